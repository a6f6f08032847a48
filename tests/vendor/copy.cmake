# cmake -Dlibrary=FILE "-Dcopies=FILE;FILE..." -P copy.cmake
foreach(copy IN LISTS copies)
  file(COPY_FILE "${library}" "${copy}")
endforeach()
