# Moves a directory, so that nothing in it is found where it was installed.
file(REMOVE_RECURSE "${TO}")
file(RENAME "${FROM}" "${TO}")
