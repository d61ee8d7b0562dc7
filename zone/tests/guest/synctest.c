// SPDX-License-Identifier: Apache-2.0 OR MIT
/* Uses the semaphores of a zone from a shell: synctest DEVICE COMMAND NAME [N]. Exit status: 0, or the errno. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "libtombolo-sync.h"

#define LONG 60000000000LL

static int pong(tmb_sync *s, int n)
{
	tmb_object ping, pong;
	int err = tmb_sync_lookup(s, TMB_SEMAPHORE, "ping", &ping);

	if (!err)
		err = tmb_sync_lookup(s, TMB_SEMAPHORE, "pong", &pong);
	for (; !err && n > 0; n--) {
		err = tmb_sem_wait(s, ping, LONG);
		if (!err)
			err = tmb_sem_post(s, pong);
	}
	return err;
}

static int ping(tmb_sync *s, int n)
{
	struct timespec start, end;
	tmb_object ping, pong;
	int err = tmb_sync_lookup(s, TMB_SEMAPHORE, "ping", &ping), i;

	if (!err)
		err = tmb_sync_lookup(s, TMB_SEMAPHORE, "pong", &pong);
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (i = 0; !err && i < n; i++) {
		err = tmb_sem_post(s, ping);
		if (!err)
			err = tmb_sem_wait(s, pong, LONG);
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("%lld\n", ((end.tv_sec - start.tv_sec) * 1000000000LL + end.tv_nsec - start.tv_nsec) / n);
	return err;
}

int main(int argc, char **argv)
{
	tmb_object o;
	tmb_sync *s;
	int err;

	if (argc < 4)
		return 255;
	err = tmb_sync_open(argv[1], &s);
	if (err)
		return -err;
	if (!strcmp(argv[2], "post")) {
		err = tmb_sync_lookup(s, TMB_SEMAPHORE, argv[3], &o);
		err = err ? err : tmb_sem_post(s, o);
	} else if (!strcmp(argv[2], "wait")) {
		err = tmb_sync_lookup(s, TMB_SEMAPHORE, argv[3], &o);
		err = err ? err : tmb_sem_wait(s, o, LONG);
	} else if (!strcmp(argv[2], "lock")) {
		err = tmb_sync_lookup(s, TMB_MUTEX, argv[3], &o);
		err = err ? err : tmb_mutex_lock(s, o, LONG);
	} else if (!strcmp(argv[2], "hold")) {
		err = tmb_sync_lookup(s, TMB_MUTEX, argv[3], &o);
		err = err ? err : tmb_mutex_lock(s, o, LONG);
		if (!err) {
			puts("held");
			fflush(stdout);
			pause();
		}
	} else if (!strcmp(argv[2], "ping")) {
		err = ping(s, atoi(argv[3]));
	} else if (!strcmp(argv[2], "pong")) {
		err = pong(s, atoi(argv[3]));
	} else {
		err = -255;
	}
	/* Without tmb_sync_close: the kernel must end the session. */
	return -err;
}
