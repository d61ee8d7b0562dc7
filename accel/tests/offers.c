// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * What a platform and its device offer is served: each extension's functions have an address, and a function of the program is run by a device that says
 * that it runs some. Prints what is offered and refused, and `N extensions`.
 */
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <CL/cl_ext.h>
#include <stdio.h>
#include <string.h>

static const char *const functions[][2] = {
	{"cl_khr_command_buffer", "clCreateCommandBufferKHR"},
	{"cl_khr_create_command_queue", "clCreateCommandQueueWithPropertiesKHR"},
	{"cl_khr_external_memory", "clEnqueueAcquireExternalMemObjectsKHR"},
	{"cl_khr_gl_sharing", "clGetGLContextInfoKHR"},
	{"cl_khr_icd", "clIcdGetPlatformIDsKHR"},
	{"cl_khr_il_program", "clCreateProgramWithILKHR"},
	{"cl_khr_semaphore", "clCreateSemaphoreWithPropertiesKHR"},
	{"cl_khr_subgroups", "clGetKernelSubGroupInfoKHR"},
	{"cl_khr_suggested_local_work_size", "clGetKernelSuggestedLocalWorkSizeKHR"},
	{"cl_khr_terminate_context", "clTerminateContextKHR"},
	{"cl_ext_buffer_device_address", "clSetKernelArgDevicePointerEXT"},
	{"cl_ext_device_fission", "clCreateSubDevicesEXT"},
	{"cl_intel_unified_shared_memory", "clHostMemAllocINTEL"},
	{"cl_pocl_content_size", "clSetContentSizeBufferPoCL"},
};

static cl_platform_id platform;

/* Checks the extensions of a list; returns how many there are. */
static int offered(const char *list)
{
	char word[256];
	int count = 0, used;

	for (; sscanf(list, "%255s%n", word, &used) == 1; list += used, count++)
		for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
			if (!strcmp(word, functions[i][0]) && !clGetExtensionFunctionAddressForPlatform(platform, functions[i][1]))
				printf("%s is offered, without %s\n", word, functions[i][1]);
	return count;
}

static void CL_CALLBACK own(void *argument)
{
	*(int *)*(void **)argument = 1;
}

int main(void)
{
	static char list[1 << 16];
	static cl_name_version versions[512];
	cl_device_id device;
	cl_device_exec_capabilities capabilities = 0;
	size_t size = 0;
	int ran = 0, code, count;
	int *argument = &ran;

	clGetPlatformIDs(1, &platform, NULL);
	clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 1, &device, NULL);
	cl_context context = clCreateContext(NULL, 1, &device, NULL, NULL, &code);
	cl_command_queue queue = clCreateCommandQueueWithProperties(context, device, NULL, &code);

	clGetPlatformInfo(platform, CL_PLATFORM_EXTENSIONS, sizeof list, list, NULL);
	count = offered(list);
	clGetPlatformInfo(platform, CL_PLATFORM_EXTENSIONS_WITH_VERSION, sizeof versions, versions, &size);
	if (size / sizeof *versions != (size_t)count)
		printf("the platform's versions are of %zu extensions\n", size / sizeof *versions);
	clGetDeviceInfo(device, CL_DEVICE_EXTENSIONS, sizeof list, list, NULL);
	count = offered(list);
	clGetDeviceInfo(device, CL_DEVICE_EXTENSIONS_WITH_VERSION, sizeof versions, versions, &size);
	if (size / sizeof *versions != (size_t)count)
		printf("the device's versions are of %zu extensions\n", size / sizeof *versions);
	printf("%s extensions\n", count ? "some" : "no");
	if (!strstr(list, "cl_khr_command_buffer") &&
	    clGetDeviceInfo(device, CL_DEVICE_COMMAND_BUFFER_CAPABILITIES_KHR, sizeof list, list, NULL) != CL_INVALID_VALUE)
		printf("capabilities of an extension that is not offered\n");

	clGetDeviceInfo(device, CL_DEVICE_EXECUTION_CAPABILITIES, sizeof capabilities, &capabilities, NULL);
	code = clEnqueueNativeKernel(queue, own, &argument, sizeof argument, 0, NULL, NULL, 0, NULL, NULL);
	clFinish(queue);
	if (!(capabilities & CL_EXEC_KERNEL))
		printf("no kernels\n");
	if (!!(capabilities & CL_EXEC_NATIVE_KERNEL) != (code == CL_SUCCESS && ran))
		printf("native kernels: offered %d, %d\n", !!(capabilities & CL_EXEC_NATIVE_KERNEL), code);
	return 0;
}
