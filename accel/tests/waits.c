// SPDX-License-Identifier: Apache-2.0 OR MIT
/* More threads than a server lets into the driver wait for a user event, which is set when a byte comes in: 'ready', then how each wait ended. */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define THREADS 300

static cl_event event;

static void *wait_for_it(void *code)
{
	*(cl_int *)code = clWaitForEvents(1, &event);
	return NULL;
}

int main(void)
{
	static cl_int codes[THREADS];
	pthread_t threads[THREADS];
	cl_platform_id platform;
	cl_device_id device;
	cl_context context;
	cl_int e;
	int done = 0, refused = 0;
	char byte;

	if (clGetPlatformIDs(1, &platform, NULL) || clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL))
		return 1;
	context = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
	event = clCreateUserEvent(context, &e);
	if (e)
		return 1;
	puts("ready");
	fflush(stdout);
	if (read(0, &byte, 1) != 1)
		return 1;
	for (int i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, wait_for_it, &codes[i]))
			return 1;
	if (read(0, &byte, 1) != 1)
		return 1;
	e = clSetUserEventStatus(event, CL_COMPLETE);
	for (int i = 0; i < THREADS; i++) {
		pthread_join(threads[i], NULL);
		done += codes[i] == CL_SUCCESS;
		refused += codes[i] == CL_OUT_OF_RESOURCES;
	}
	printf("set: %d\ndone: %d\nrefused: %d\n", e, done, refused);
	return 0;
}
