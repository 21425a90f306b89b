// Every call's status is read: a program that ends with status 0 proves nothing by itself.
#pragma once
#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                              \
    do {                                                                                         \
        const cudaError_t status_ = (call);                                                      \
        if (status_ != cudaSuccess) {                                                            \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status_));                     \
            exit(4);                                                                             \
        }                                                                                        \
    } while (0)

// Milliseconds that `work` takes on the device.
template <class Work>
double milliseconds(Work work) {
    cudaEvent_t began, ended;
    float taken = 0;
    CHECK(cudaEventCreate(&began));
    CHECK(cudaEventCreate(&ended));
    CHECK(cudaEventRecord(began));
    work();
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(ended));
    CHECK(cudaEventSynchronize(ended));
    CHECK(cudaEventElapsedTime(&taken, began, ended));
    CHECK(cudaEventDestroy(began));
    CHECK(cudaEventDestroy(ended));
    return taken;
}
