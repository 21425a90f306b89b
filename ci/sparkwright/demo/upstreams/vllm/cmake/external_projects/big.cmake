# A large kernel library of another project, fetched at configure time.
include(FetchContent)
if(DEFINED ENV{BIG_SRC_DIR})
  set(BIG_SRC_DIR $ENV{BIG_SRC_DIR})
endif()
if(BIG_SRC_DIR)
  FetchContent_Declare(big SOURCE_DIR ${BIG_SRC_DIR})
else()
  FetchContent_Declare(
    big
    GIT_REPOSITORY https://upstream.example/mini/big.git
    GIT_TAG v1.0)
endif()
FetchContent_MakeAvailable(big)
