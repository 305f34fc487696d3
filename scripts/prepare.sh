# shellcheck shell=bash
# Sourced by ./run and ./test: makes sure that the packages a command needs are there.
#
#     need PACKAGE PROBE...     the command cannot work until PROBE succeeds; PACKAGE brings it
#     want PACKAGE PROBE...     the same for what it can do without
#     prepare_packages COMMAND  installs what is missing, or says what to type and exits
#
# When nothing is missing no package tool is called at all.

needed=() # "PACKAGE PROBE..." an entry
wanted=()
need() { needed+=("$*"); }
want() { wanted+=("$*"); }

has_command() { command -v "$1"; }
has_header() { echo "#include <$1>" | cc -E -; }
has_library() { pkg-config --exists "$1"; }
has_shared_object() { PATH=$PATH:/sbin ldconfig -p | grep -F "$1"; }
has_python_venv() { python3 -c 'import ensurepip, venv'; }
has_libfuzzer() {
    echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n > 9; }' |
        clang -x c -fsanitize=fuzzer,address,undefined -o /dev/null -
}

# Every command of this project builds.
need_build_tools() {
    need gcc has_command cc
    need libc6-dev has_header stdio.h
    need cmake has_command cmake
    need ninja-build has_command ninja
    need pkg-config has_command pkg-config
    need libjansson-dev has_library jansson
}

# Prints the packages of the given entries whose probe fails.
missing_of() {
    local entry words
    for entry in "$@"; do
        read -ra words <<<"$entry"
        ("${words[@]:1}") >/dev/null 2>&1 || echo "${words[0]}"
    done
}

find_missing() {
    mapfile -t required < <(missing_of "${needed[@]}")
    mapfile -t optional < <(missing_of "${wanted[@]}")
}

may_install() {
    command -v apt-get >/dev/null || return 1
    [ "$(id -u)" = 0 ] || { command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; }
}

# The given packages without those that this release has not: their content is then elsewhere, and the probes will
# tell. Without apt's lists every name stands. `apt-cache show` knows any name that an installed package mentions.
available() {
    local package known=()
    for package in "$@"; do
        if [ -n "$(apt-cache madison "$package" 2>/dev/null)" ]; then known+=("$package"); fi
    done
    if [ ${#known[@]} = 0 ]; then known=("$@"); fi
    echo "${known[*]}"
}

install_packages() {
    local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300) packages log
    [ "$(id -u)" = 0 ] || apt=(sudo "${apt[@]}")
    log=$(mktemp)
    echo "Installing with apt-get: $*" >&2
    "${apt[@]}" update </dev/null >"$log" 2>&1 || true # the lists that are there may do
    read -ra packages < <(available "$@")
    "${apt[@]}" install -y --no-install-recommends "${packages[@]}" </dev/null >>"$log" 2>&1 || tail -n 20 "$log" >&2
    rm -f "$log"
}

prepare_packages() {
    local required optional
    find_missing
    if [ $((${#required[@]} + ${#optional[@]})) != 0 ] && may_install; then
        install_packages "${required[@]}" "${optional[@]}"
        find_missing
    fi
    if [ ${#required[@]} != 0 ]; then
        echo "$1 needs packages that are not here. As root, type:"
        echo "    apt-get update && apt-get install --no-install-recommends $(available "${required[@]}" "${optional[@]}")"
        exit 1
    fi >&2
    if [ ${#optional[@]} != 0 ]; then echo "Going on without ${optional[*]}" >&2; fi
}

# prepare_venv FOLDER PINS: a Python with what PINS names, in FOLDER; made again only when that file changes.
prepare_venv() {
    if cmp -s "$2" "$1/requirements.txt" && "$1/bin/python" -c ''; then return; fi
    echo "Making $1, a Python for the tests" >&2
    python3 -m venv --clear "$1"
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check -r "$2"
    cp "$2" "$1/requirements.txt"
}
