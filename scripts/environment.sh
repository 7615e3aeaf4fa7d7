# Sourced by scripts/demo and scripts/test: `prepare_environment` makes .venv in the project's folder, or finds it ready.
# Needs Python 3.11 or later with pip (PYTHON=/path/to/python chooses one); everything else is installed into .venv, in
# the versions that constraints.txt names. All messages go to standard error.

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
environment=$project/.venv
made=$environment/.surgeon-made              # this script made the environment, and may throw it away
unfinished=$environment/.surgeon-unfinished  # there while it is being made or changed
ready=$environment/.surgeon-ready            # what was installed: `fingerprint`

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

# What an environment depends on: where it lies (its programs have that path inside), and the two files.
fingerprint() {
    printf '%s\n' "$project"
    cat -- "$project/pyproject.toml" "$project/constraints.txt" | cksum
}

is_ready() { [ -x "$environment/bin/python" ] && [ "$(cat -- "$ready" 2>/dev/null)" = "$(fingerprint)" ]; }

is_usable() {
    [ ! -e "$unfinished" ] && new_enough "$environment/bin/python" && has "$environment/bin/python" pip &&
        { [ ! -e "$ready" ] || [ "$(head -n 1 -- "$ready")" = "$project" ]; }
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
has() { "$1" -c "import $2" >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 python; do
        if new_enough "$candidate"; then
            command -v -- "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later found (looked for python3, python3.11 to python3.14 and python);" \
        "install one, or set PYTHON=/path/to/python"
}

make_environment() {
    local python=$1 package="(on Debian and Ubuntu: apt install python3-venv)"
    has "$python" venv || fail "$python has no venv module; install it $package and run this again"
    has "$python" ensurepip || has "$python" pip ||
        fail "$python has neither ensurepip nor pip; install one $package and run this again"
    say "making .venv with $python and installing into it: once, a few minutes"
    mkdir -p -- "$environment"
    # The marks are set first and kept: whatever interrupts this, the next call knows whose environment it is.
    : >"$made"
    : >"$unfinished"
    rm -f -- "$ready"
    find "$environment" -mindepth 1 -maxdepth 1 ! -name '.surgeon-*' -exec rm -rf -- {} +
    if has "$python" ensurepip; then
        "$python" -m venv "$environment" >&2
    else # Debian keeps ensurepip in a package of its own; this Python's pip serves as well
        "$python" -m venv --without-pip "$environment" >&2
        "$python" -m pip --python "$environment/bin/python" install --disable-pip-version-check pip >&2
    fi || fail "making .venv did not work; the message above says why. Once mended, run this again"
}

install_project() {
    if [ -e "$made" ]; then : >"$unfinished"; fi
    rm -f -- "$ready"
    (cd -- "$project" && PIP_USER=0 "$environment/bin/python" -m pip install --disable-pip-version-check \
        -c constraints.txt -e ".[dev]" >&2) ||
        fail "installing into .venv did not work; pip's message above says why. Once mended, run this again"
    fingerprint >"$ready"
    rm -f -- "$unfinished"
}

prepare_environment() {
    { : 3<&0; } 2>/dev/null || exec </dev/null # a closed standard input becomes an empty one
    if is_ready; then return; fi
    # Two first calls at the same time would make the same environment: the second one waits for the first.
    exec 9<"$project/pyproject.toml"
    if command -v flock >/dev/null; then flock 9; fi
    if ! is_ready; then
        if is_usable; then
            say "installing what is missing into .venv"
        elif rmdir -- "$environment" 2>/dev/null || [ ! -e "$environment" ] || [ -e "$made" ]; then
            local python
            python=$(find_python) || exit 1
            make_environment "$python"
        else
            fail "$environment has no Python 3.11 or later with pip, or belongs elsewhere; move it away and run this again"
        fi
        install_project
    fi
    exec 9<&-
}
