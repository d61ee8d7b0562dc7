// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Processes that a server holds back (accel/server/src/hold.rs), without a server:
 *
 *	held hop N	N threads that want to run; each starts the next one and ends, after some microseconds
 *	held crowd N	N threads that always want to run
 *	held chain N	a process that started one that started one, N in all, which sleep
 *
 * Each says 'ready'.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <signal.h>
#include <unistd.h>

static pthread_attr_t small;

static void start(void *(*run)(void *))
{
	pthread_t thread;

	if (pthread_create(&thread, &small, run, NULL))
		exit(1);
}

static void *hop(void *none)
{
	for (volatile int i = 0; i < 20000; i++)
		;
	start(hop);
	return none;
}

static void *spin(void *none)
{
	for (volatile int i = 0;; i++)
		;
	return none;
}

int main(int n, char **v)
{
	int count = n > 2 ? atoi(v[2]) : 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 65536);
	pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
	if (n > 2 && !strcmp(v[1], "chain")) {
		for (int i = 1; i < count; i++) {
			pid_t child = fork();

			if (child < 0)
				return 1;
			if (child)
				for (;;)
					pause();
			prctl(PR_SET_PDEATHSIG, SIGKILL);
		}
	} else if (n > 2) {
		for (int i = 0; i < count; i++)
			start(strcmp(v[1], "hop") ? spin : hop);
	} else {
		return 2;
	}
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
