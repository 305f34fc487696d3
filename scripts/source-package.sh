# shellcheck shell=bash
# Sourced by scripts that build a library for another processor or an older glibc, which distributions do not package.
#
#     fetch_source PACKAGE FOLDER    unpacks the distribution's source package, verified by apt, into a folder of FOLDER
#
# The system's apt lists and sources are not modified.
fetch_source() {
    local file work=$2/apt apt
    mkdir -p "$work"/{sources,lists,cache/archives/partial}
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
        if [ -f "$file" ]; then
            sed -e 's/^deb /deb-src /' -e 's/^Types:.*/Types: deb-src/' "$file" >"$work/sources/${file##*/}"
        fi
    done
    apt=(apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/sources"
        -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=)
    "${apt[@]}" update || true # a broken entry may not matter
    (cd "$2" && "${apt[@]}" source --download-only --tar-only "$1" && tar -xf "$1"_*.orig.tar.?z*)
}
