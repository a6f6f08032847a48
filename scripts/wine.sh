#!/bin/sh
# wine.sh PROGRAM [ARGUMENT...]: runs a program for Windows by Wine, as if on a Windows of its own in build/wine. The first run
# makes that, in a minute. Debian has Wine's programs in /usr/lib/wine, beside the path.
set -eu
export WINEPREFIX="${WINEPREFIX:-$(realpath "$(dirname "$0")/..")/build/wine}"
export WINEDEBUG="${WINEDEBUG:--all}"
export WINEDLLOVERRIDES="mscoree,mshtml,winedbg.exe=" # no .NET, no browser, no debugger: it would ask for them
PATH=$PATH:/usr/lib/wine
if [ ! -e "$WINEPREFIX/made" ]; then
  mkdir -p "$WINEPREFIX"
  wine64 wineboot --init
  wineserver -w
  touch "$WINEPREFIX/made"
fi
exec wine64 "$@"
