#!/bin/sh
# Fetches the distribution's sources of Google Benchmark into a directory, for cross builds. Needs apt, but neither root nor
# settings: apt's lists are kept in the directory.
#   scripts/benchmark_sources.sh DIRECTORY     the sources are DIRECTORY/source
set -eu

directory=${1:?usage: scripts/benchmark_sources.sh DIRECTORY}
command -v apt-get >/dev/null || {
  echo "scripts/benchmark_sources.sh needs apt-get. Without it, unpack Google Benchmark's sources yourself, and" >&2
  echo "pass their directory to CMake as LOWBIT_BENCHMARK_DIR." >&2
  exit 1
}
rm -rf "$directory"
mkdir -p "$directory/apt/lists/partial" "$directory/apt/cache/archives/partial" "$directory/unpacked"
cd "$directory"
apt-get indextargets --format 'deb-src $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
  grep -E ' (main|universe)$' | sort -u >apt/sources.list
private_apt() {
  apt-get -qq -o APT::Sandbox::User=root -o Dir::State::Lists="$PWD/apt/lists" -o Dir::Cache="$PWD/apt/cache" \
    -o Dir::Etc::SourceList="$PWD/apt/sources.list" -o Dir::Etc::SourceParts=- "$@"
}
private_apt update
private_apt source --download-only benchmark
tar -x -f benchmark_*.orig.tar.* -C unpacked --strip-components=1
rm -rf apt
mv unpacked source  # renamed at the end, so that the directory is always complete
