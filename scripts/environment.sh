# Sourced by scripts/demo, scripts/test and others: `prepare_environment WHAT` makes .venv in the project's folder, or
# finds it ready. WHAT is "surgeon", with the packages it needs, or "developer", which adds the developers' tools.
# Needs Python 3.11 or later with pip (PYTHON=/path/to/python chooses one); everything else is installed into .venv, in
# the versions that constraints.txt names. All messages go to standard error, and pip's to a file.

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
environment=$project/.venv
made=$environment/.surgeon-made              # this script made the environment, and may throw it away
unfinished=$environment/.surgeon-unfinished  # there while it is being made or changed
ready=$environment/.surgeon-ready            # what was installed: `stamp`
log=$environment/.surgeon-pip.log            # what pip said

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

# What an environment depends on: where it lies (its programs have that path inside), and the two files.
fingerprint() {
    printf '%s\n' "$project"
    cat -- "$project/pyproject.toml" "$project/constraints.txt" | cksum
}

stamp() { printf '%s\n' "$(fingerprint)" "$1"; }

# Who has the developers' tools has the rest, too.
is_ready() {
    local installed
    [ -x "$environment/bin/python" ] && installed=$(cat -- "$ready" 2>/dev/null) &&
        { [ "$installed" = "$(stamp "$1")" ] || [ "$installed" = "$(stamp developer)" ]; }
}

has_tools() { case $(cat -- "$ready" 2>/dev/null) in *$'\n'developer) ;; *) return 1 ;; esac; }

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
    say "making .venv with $python"
    mkdir -p -- "$environment"
    # The marks are set first and kept: whatever interrupts this, the next call knows whose environment it is.
    : >"$made"
    : >"$unfinished"
    rm -f -- "$ready"
    find "$environment" -mindepth 1 -maxdepth 1 ! -name '.surgeon-*' -exec rm -rf -- {} +
    if has "$python" ensurepip; then
        "$python" -m venv "$environment" >"$log" 2>&1
    else # Debian keeps ensurepip in a package of its own; this Python's pip serves as well
        "$python" -m venv --without-pip "$environment" >"$log" 2>&1 &&
            "$python" -m pip --python "$environment/bin/python" install --disable-pip-version-check pip >>"$log" 2>&1
    fi || fail_with_log "making .venv"
}

install_project() {
    local what=$1 requirement=".[all]" content="surgeon and about 120 packages (PyTorch is the largest)" began=$SECONDS
    if [ "$what" = developer ]; then
        requirement=".[dev]"
        content+=" and 50 for developers"
    fi
    if [ -e "$made" ]; then : >"$unfinished"; fi
    rm -f -- "$ready"
    say "installing $content"
    say "this takes some minutes the first time, most of them for downloads"
    say "what pip says goes to $log"
    (cd -- "$project" && PIP_USER=0 "$environment/bin/python" -m pip install --disable-pip-version-check \
        -c constraints.txt -e "$requirement" >"$log" 2>&1) || fail_with_log "installing into .venv"
    stamp "$what" >"$ready"
    rm -f -- "$unfinished"
    say "installed in $((SECONDS - began)) s"
}

fail_with_log() {
    tail -n 5 -- "$log" >&2
    fail "$1 did not work; pip's last words are above, and all of them in $log. Once mended, run this again"
}

prepare_environment() {
    local what=$1
    { : 3<&0; } 2>/dev/null || exec </dev/null # a closed standard input becomes an empty one
    if is_ready "$what"; then return; fi
    # Two first calls at the same time would make the same environment: the second one waits for the first.
    exec 9<"$project/pyproject.toml"
    if command -v flock >/dev/null; then flock 9; fi
    if ! is_ready "$what"; then
        if is_usable; then
            if has_tools; then what=developer; fi # the demo takes nothing away
        elif rmdir -- "$environment" 2>/dev/null || [ ! -e "$environment" ] ||
            { [ -e "$made" ] && [ ! -L "$environment" ]; }; then # a link is to somebody else's
            local python
            python=$(find_python) || exit 1
            make_environment "$python"
        else
            fail "$environment has no Python 3.11 or later with pip, or belongs elsewhere; move it away and run this again"
        fi
        install_project "$what"
    fi
    exec 9<&-
}
