# Installs libraries, public headers and the CMake package for find_package(lowbit). In the Python package everything is in the
# package's directory, otherwise in the places that CMAKE_INSTALL_PREFIX and GNUInstallDirs name. Installed files contain no
# absolute paths.
include(CMakePackageConfigHelpers)
if(LOWBIT_BUILD_PYTHON)
  set(library_dir lowbit)
  set(header_dir lowbit/include)
  set(package_dir lowbit/lib/cmake/lowbit)
  set(executorch_beside "../../../../executorch")  # seen from package_dir: site-packages/executorch
  install(TARGETS _C LIBRARY DESTINATION ${library_dir})
  # Not in wheel.packages, so that an editable installation has a copy, which stays when the clone is moved.
  install(FILES "${PROJECT_SOURCE_DIR}/python/lowbit_entry.py" DESTINATION .)
else()
  include(GNUInstallDirs)
  set(library_dir ${CMAKE_INSTALL_LIBDIR})
  set(header_dir ${CMAKE_INSTALL_INCLUDEDIR})
  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lowbit)
  set(executorch_beside "")

  # For programs that are built without CMake. Whoever links a static library needs the libraries that it uses.
  set(pc_libraries "")
  if(LOWBIT_STATIC)
    set(uses ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES} ${CMAKE_DL_LIBS} pthread)
    list(FILTER uses EXCLUDE REGEX "^(gcc|gcc_s|c|.*[/.].*)$")
    list(REMOVE_DUPLICATES uses)
    foreach(library IN LISTS uses)
      string(APPEND pc_libraries " -l${library}")
    endforeach()
  endif()
  file(RELATIVE_PATH pc_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
  configure_file(cmake/lowbit.pc.in "${PROJECT_BINARY_DIR}/package/lowbit.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/package/lowbit.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

# The public headers. Each of them compiles alone, with an older C++ standard than the sources.
foreach(directory kernels kernels/bits ops plan runner)
  set(headers_kernels lowbit_ukernel.h status.h export.h inline.h isa.h isas.h mapping.h numeric.h format.h ukernel.h library.h
      elementwise.h recurrence.h registry.h pack.h)
  set(headers_kernels/bits codec.h)
  set(headers_ops operators.h tensor_view.h parallel.h load_kernels.h)
  set(headers_plan cores.h lowbit.h model.h sampling.h threads.h)
  set(headers_runner tokenizer.h)
  list(TRANSFORM headers_${directory} PREPEND "${PROJECT_SOURCE_DIR}/${directory}/" OUTPUT_VARIABLE headers)
  install(FILES ${headers} DESTINATION ${header_dir}/lowbit/${directory})
endforeach()
target_include_directories(lowbit INTERFACE $<INSTALL_INTERFACE:${header_dir}>)
target_compile_features(lowbit INTERFACE cxx_std_17)

# One file of targets per component, so that the file shows whether the component is installed.
foreach(component kernels:lowbit executorch:lowbit_executorch torch:lowbit_torch)
  string(REGEX MATCH "^(.*):(.*)$" match ${component})
  if(TARGET ${CMAKE_MATCH_2})
    install(TARGETS ${CMAKE_MATCH_2} EXPORT lowbit-${CMAKE_MATCH_1} LIBRARY DESTINATION ${library_dir}
      ARCHIVE DESTINATION ${library_dir})
    install(EXPORT lowbit-${CMAKE_MATCH_1} NAMESPACE lowbit:: DESTINATION ${package_dir})
  endif()
endforeach()

if(TARGET lowbit-run)
  set(above "$ORIGIN/..")
  if(APPLE)
    set(above "@loader_path/..")
  endif()
  set_target_properties(lowbit-run PROPERTIES INSTALL_RPATH "${above}/${CMAKE_INSTALL_LIBDIR}")
  install(TARGETS lowbit-run RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} OPTIONAL)
endif()

set(package_files "${PROJECT_BINARY_DIR}/package")
configure_file(cmake/lowbit-config.cmake.in "${package_files}/lowbit-config.cmake" @ONLY)
write_basic_package_version_file("${package_files}/lowbit-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${package_files}/lowbit-config.cmake" "${package_files}/lowbit-config-version.cmake"
  DESTINATION ${package_dir})
