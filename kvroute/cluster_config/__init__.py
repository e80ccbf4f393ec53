"""The lines an operator must put into engine and pool configuration so that their events reach kvroute (pure)."""
