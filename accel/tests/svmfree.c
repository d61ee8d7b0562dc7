// SPDX-License-Identifier: Apache-2.0 OR MIT
/* Threads that take and give back shared virtual memory at the same time: what one gives back is free for the other on all sides. */
#define CL_TARGET_OPENCL_VERSION 200
#include <CL/cl.h>
#include <pthread.h>
#include <stdio.h>

static cl_context context;

static void *takes_and_gives(void *missed)
{
	for (int i = 0; i < 2000; i++) {
		char *p = clSVMAlloc(context, CL_MEM_READ_WRITE, 1 << 16, 0);
		if (p)
			p[i] = 1;
		else
			++*(int *)missed;
		clSVMFree(context, p);
	}
	return NULL;
}

int main(void)
{
	cl_platform_id platform;
	cl_device_id device;
	pthread_t threads[4];
	int e, missed[4] = {0};

	clGetPlatformIDs(1, &platform, NULL);
	clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, takes_and_gives, &missed[i]);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	printf("missed %d\n", missed[0] + missed[1] + missed[2] + missed[3]);
	return 0;
}
