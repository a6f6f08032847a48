# Functions for scripts that use packages of another Debian release or processor, without installing them.
# DEBIAN_MIRROR selects the mirror; by default that of this machine's apt, or else debootstrap's.
# shellcheck shell=bash

# need_tools TOOL...: ends the script when one is missing.
need_tools() {
  local tool
  for tool in "$@"; do
    command -v "$tool" >/dev/null || {
      echo "$tool is missing; \`scripts/need.sh test\` installs what is needed on Debian and Ubuntu" >&2
      exit 1
    }
  done
}

debian_keyring=/usr/share/keyrings/debian-archive-keyring.gpg

debian_mirror() {
  local mirror=${DEBIAN_MIRROR:-}
  if [ -z "$mirror" ] && command -v apt-get >/dev/null; then
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' |
      grep -E -m 1 '^(https?|file):' || true)
  fi
  if [ -z "$mirror" ]; then
    mirror=$(sed -n 's/^DEF_MIRROR="\(.*\)"$/\1/p' /usr/sbin/debootstrap 2>/dev/null || true)
  fi
  echo "${mirror:-https://deb.debian.org/debian}"
}

# debian_apt_in DIRECTORY ARCHITECTURE SUITE [KIND...]: sets up a separate apt in DIRECTORY; KIND is deb (the default) or
# deb-src. Then debian_apt COMMAND... runs apt-get or another of its commands; the output is in DIRECTORY/log.
debian_apt_in() {
  local kind mirror
  need_tools apt-get dpkg-deb
  [ -f "$debian_keyring" ] || {
    echo "$debian_keyring is missing: the package debian-archive-keyring has it" >&2
    exit 1
  }
  debian_apt=$1
  mkdir -p "$debian_apt"/{lists/partial,archives/partial}
  debian_apt=$(cd "$debian_apt" && pwd)
  mirror=$(debian_mirror)
  [ $# -gt 3 ] || set -- "$@" deb
  for kind in "${@:4}"; do
    echo "$kind [signed-by=$debian_keyring] $mirror $3 main"
  done >"$debian_apt/sources.list"
  : >"$debian_apt/status"
  cat >"$debian_apt/apt.conf" <<SETTINGS
Dir::State "$debian_apt";
Dir::State::Status "$debian_apt/status";
Dir::Cache "$debian_apt";
Dir::Etc::SourceList "$debian_apt/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
APT::Architecture "$2";
APT::Architectures { "$2"; };
APT::Install-Recommends "0";
APT::Sandbox::User "";
Acquire::Languages "none";
Debug::NoLocking "1";
SETTINGS
}

debian_apt() {
  APT_CONFIG=$debian_apt/apt.conf "$@" >"$debian_apt/log" 2>&1 || {
    tail -n 20 "$debian_apt/log" >&2
    echo "$1 failed; DEBIAN_MIRROR=<URL> chooses another Debian mirror than $(debian_mirror)" >&2
    exit 1
  }
}
