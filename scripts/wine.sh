#!/bin/sh
# wine.sh PROGRAM [ARGUMENT...]: runs a Windows program by Wine, with a Windows installation in build/wine that the first run
# makes in a minute. Debian's Wine is in /usr/lib/wine, which is not on the path.
set -eu
export WINEPREFIX="${WINEPREFIX:-$(realpath "$(dirname "$0")/..")/build/wine}"
export WINEDEBUG="${WINEDEBUG:--all}"
export WINEDLLOVERRIDES="mscoree,mshtml,winedbg.exe=" # no .NET, browser or debugger, which Wine would ask for
PATH=$PATH:/usr/lib/wine
if [ ! -e "$WINEPREFIX/made" ]; then
  mkdir -p "$WINEPREFIX"
  wine64 wineboot --init
  wineserver -w
  touch "$WINEPREFIX/made"
fi
exec wine64 "$@"
