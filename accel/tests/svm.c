// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Shared virtual memory: whether the device has some, as it says and as it turns out; a list whose pointers a kernel follows, prints what it found and what
 * the program then sees.
 */
#define CL_TARGET_OPENCL_VERSION 200
#include <CL/cl.h>
#include <stdio.h>

struct node {
	struct node *next;
	long value;
};

int main(void)
{
	static const char *source = "struct node { global struct node *next; long value; };\n"
				    "kernel void visit(global struct node *n, global long *sum) {\n"
				    "	*sum = 0;\n"
				    "	for (; n; n = n->next) { *sum += n->value; n->value *= 2; }\n"
				    "}\n";
	cl_platform_id platform;
	cl_device_id device;
	int e;

	clGetPlatformIDs(1, &platform, NULL);
	clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
	cl_context context = clCreateContext(NULL, 1, &device, NULL, NULL, &e);
	cl_command_queue queue = clCreateCommandQueueWithProperties(context, device, NULL, &e);
	cl_program program = clCreateProgramWithSource(context, 1, &source, NULL, &e);
	cl_device_svm_capabilities announced = 99;
	clGetDeviceInfo(device, CL_DEVICE_SVM_CAPABILITIES, sizeof announced, &announced, NULL);
	/* No forwarded device has fine-grained system memory. */
	printf("announced %lx\n", (long)(announced & ~CL_DEVICE_SVM_FINE_GRAIN_SYSTEM));
	printf("build %d\n", clBuildProgram(program, 0, NULL, NULL, NULL, NULL));
	cl_kernel visit = clCreateKernel(program, "visit", &e);
	struct node *nodes = clSVMAlloc(context, CL_MEM_READ_WRITE, 100 * sizeof *nodes, 0);
	long *sum = clSVMAlloc(context, CL_MEM_READ_WRITE, sizeof *sum, 0);

	printf("allocated %d %d\n", nodes != NULL, sum != NULL);
	if (!nodes || !sum)
		return 1;
	printf("map %d\n", clEnqueueSVMMap(queue, CL_TRUE, CL_MAP_WRITE, nodes, 100 * sizeof *nodes, 0, NULL, NULL));
	for (int i = 0; i < 100; i++)
		nodes[i] = (struct node){ i ? &nodes[i - 1] : NULL, i };
	printf("unmap %d\n", clEnqueueSVMUnmap(queue, nodes, 0, NULL, NULL));
	printf("arguments %d %d\n", clSetKernelArgSVMPointer(visit, 0, &nodes[99]), clSetKernelArgSVMPointer(visit, 1, sum));
	size_t one = 1;
	printf("launch %d\n", clEnqueueNDRangeKernel(queue, visit, 1, NULL, &one, NULL, 0, NULL, NULL));
	printf("finish %d\n", clFinish(queue));
	printf("sum %ld, last %ld\n", *sum, nodes[99].value);
	clSVMFree(context, nodes);
	clSVMFree(context, sum);
	return 0;
}
