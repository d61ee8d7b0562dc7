// SPDX-License-Identifier: Apache-2.0 OR MIT
// Adds vectors through the runtime: a stream and the default one, pinned and ordinary memory, events, and the errors of a launch that can't be.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

#define MUST(call) do { cudaError_t e = (call); if (e != cudaSuccess) { printf("%s: %s\n", #call, cudaGetErrorName(e)); exit(1); } } while (0)

__global__ void add(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        c[i] = a[i] + b[i];
}

static unsigned long long sum(const float *c, int n) {
    unsigned long long all = 0;
    for (int i = 0; i < n; i++)
        all = all * 31 + (unsigned long long)(c[i] * 2);
    return all;
}

static void adds(int n, bool pinned, cudaStream_t stream) {
    size_t bytes = n * sizeof(float);
    float *a, *b, *c, *da, *db, *dc;
    if (pinned) {
        MUST(cudaMallocHost(&a, bytes));
        MUST(cudaMallocHost(&b, bytes));
        MUST(cudaMallocHost(&c, bytes));
    } else {
        a = (float *)malloc(bytes), b = (float *)malloc(bytes), c = (float *)malloc(bytes);
    }
    for (int i = 0; i < n; i++)
        a[i] = i * 0.5f, b[i] = n - i;
    MUST(cudaMalloc(&da, bytes));
    MUST(cudaMalloc(&db, bytes));
    MUST(cudaMalloc(&dc, bytes));
    MUST(cudaMemcpyAsync(da, a, bytes, cudaMemcpyHostToDevice, stream));
    MUST(cudaMemcpyAsync(db, b, bytes, cudaMemcpyHostToDevice, stream));
    for (int again = 0; again < 3; again++)
        add<<<(n + 255) / 256, 256, 0, stream>>>(da, db, dc, n);
    MUST(cudaGetLastError());
    MUST(cudaMemcpyAsync(c, dc, bytes, cudaMemcpyDeviceToHost, stream));
    MUST(cudaStreamSynchronize(stream));
    int wrong = 0;
    for (int i = 0; i < n; i++)
        wrong += c[i] != a[i] + b[i];
    printf("%d of %d wrong, sum %llx\n", wrong, n, sum(c, n));
    MUST(cudaMemset(dc, 0, bytes));
    MUST(cudaMemcpy(c, dc, bytes, cudaMemcpyDefault));
    printf("cleared: %llx\n", sum(c, n));
    MUST(cudaFree(da));
    MUST(cudaFree(db));
    MUST(cudaFree(dc));
    if (pinned) {
        MUST(cudaFreeHost(a));
        MUST(cudaFreeHost(b));
        MUST(cudaFreeHost(c));
    } else {
        free(a), free(b), free(c);
    }
}

int main() {
    int count = 0;
    MUST(cudaGetDeviceCount(&count));
    cudaDeviceProp p;
    MUST(cudaGetDeviceProperties(&p, 0));
    printf("%d devices, %s, %d.%d\n", count, p.name, p.major, p.minor);
    cudaStream_t stream;
    MUST(cudaStreamCreate(&stream));
    cudaEvent_t before, after;
    MUST(cudaEventCreate(&before));
    MUST(cudaEventCreate(&after));
    MUST(cudaEventRecord(before, stream));
    for (int n : {1, 1000, 50000, 2000000}) {
        adds(n, false, 0);
        adds(n, true, stream);
    }
    MUST(cudaEventRecord(after, stream));
    MUST(cudaEventSynchronize(after));
    float ms = -1;
    MUST(cudaEventElapsedTime(&ms, before, after));
    printf("elapsed: %s\n", ms >= 0 ? "yes" : "no");
    add<<<1, 4096>>>(nullptr, nullptr, nullptr, 0);
    printf("a block that is too large: %s\n", cudaGetErrorName(cudaGetLastError()));
    printf("an address of nobody's: %s\n", cudaGetErrorName(cudaMemset((void *)4096, 0, 16)));
    (void)cudaGetLastError();
    MUST(cudaDeviceSynchronize());
    MUST(cudaEventDestroy(before));
    MUST(cudaEventDestroy(after));
    MUST(cudaStreamDestroy(stream));
    MUST(cudaDeviceReset());
    printf("done\n");
}
