# shellcheck shell=bash
# Sourced by ./run and ./test: installs the packages that a command needs.
#
#     need PACKAGE PROBE...     PACKAGE is required; it is installed if the command PROBE succeeds
#     want PACKAGE PROBE...     the same for an optional package
#     prepare_packages COMMAND  installs missing packages, or prints the command to type and exits
#
# If no package is missing, no package manager is called.

needed=() # each entry is "PACKAGE PROBE..."
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

# Packages for building, which every command of this project needs.
need_build_tools() {
    need gcc has_command cc
    need libc6-dev has_header stdio.h
    need cmake has_command cmake
    need ninja-build has_command ninja
    need pkg-config has_command pkg-config
    need libjansson-dev has_library jansson
    need libpng-dev has_library libpng
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

# Prints those of the given packages that this release of the distribution has. A missing one is usually part of another
# package; the probes find out. Without apt's lists, prints all of them. Uses madison because `apt-cache show` also
# accepts names that an installed package merely mentions.
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
    "${apt[@]}" update </dev/null >"$log" 2>&1 || true # the existing lists may suffice
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
        echo "$1 needs packages that are not installed. As root, type:"
        echo "    apt-get update && apt-get install --no-install-recommends $(available "${required[@]}" "${optional[@]}")"
        exit 1
    fi >&2
    if [ ${#optional[@]} != 0 ]; then echo "Continuing without ${optional[*]}" >&2; fi
}

# prepare_venv FOLDER PINS: creates a virtual environment with the packages of the file PINS, unless it is up to date.
prepare_venv() {
    mkdir -p build
    (
        flock 8 # another call may be at it
        if cmp -s "$2" "$1/requirements.txt" && "$1/bin/python" -c ''; then exit; fi
        echo "Creating $1, the Python environment of the tests" >&2
        python3 -m venv --clear "$1"
        # Python compiles the modules that are imported: a fraction of the 12,000 files.
        "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile -r "$2"
        cp "$2" "$1/requirements.txt"
    ) 8>"build/$(basename "$1").lock"
}
