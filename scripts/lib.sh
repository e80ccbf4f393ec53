# Shared by the scripts here; plain sh. After ". scripts/lib.sh" the working folder is the project's.

say() {
    echo "$*" >&2
}

die() {
    say "$0: $*"
    exit 1
}

# The first Python 3.11 or later with venv; $PYTHON names another.
find_python() {
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c \
            'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    die "needs Python 3.11 or later with venv (on Debian: apt-get install python3 python3-venv)"
}

# Everything that decides what gets installed: these files, the arguments, and where the project is.
fingerprint() {
    {
        pwd
        echo "$*"
        for file in pyproject.toml setup.py requirements.lock "$@"; do
            [ -f "$file" ] && cat "$file"
        done
        find services -type f \( -name '*.c' -o -name '*.h' \) -exec cat {} +
    } | cksum
}

# make_environment FOLDER [argument of pip install]...: a virtual environment, installed anew only after a change.
make_environment() {
    environment=$1
    shift
    wanted=$(fingerprint "$@")
    if [ -x "$environment/bin/python" ] && [ "$(cat "$environment/.installed" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    if ! "$environment/bin/python" -c 'import pip' >/dev/null 2>&1; then
        python=$(find_python) || exit 1
        say "making $environment with $("$python" --version)"
        rm -rf "$environment"
        "$python" -m venv "$environment" || die "cannot make a virtual environment in $environment"
    fi
    say "installing into $environment (a minute the first time) ..."
    rm -f "$environment/.installed"
    "$environment/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@" >&2 \
        || die "installation failed"
    echo "$wanted" >"$environment/.installed"
}

# The environment for development and tests, in .venv.
make_venv() {
    make_environment .venv -c requirements.lock -e '.[dev]'
}

unset PYTHONHOME PYTHONPATH
cd "$(dirname "$0")/.." || exit 1
[ -f pyproject.toml ] || die "is not in its project"
