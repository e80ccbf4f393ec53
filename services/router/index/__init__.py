"""The prefix index: one behaviour, a plain implementation and (where it was compiled) a native one."""
