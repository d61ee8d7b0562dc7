// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Uses the semaphores of a zone from a shell: synctest DEVICE COMMAND NAME|N. Exit status: 0, or the errno. To compare: `synctest tcp
 * pong N` and `synctest tcp ping N` send a byte there and back over TCP, between the addresses 10.0.0.1 and any.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
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

/* A connection without delays, to the port of the one who answers. */
static int tcp_connection(int answers)
{
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(7000)};
	int one = 1, s = socket(AF_INET, SOCK_STREAM, 0), c = s;

	inet_aton("10.0.0.1", &at.sin_addr);
	if (s < 0)
		return -1;
	if (answers) {
		if (setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) || bind(s, (void *)&at, sizeof(at)) || listen(s, 1))
			return -1;
		c = accept(s, NULL, NULL);
		close(s);
	} else {
		while (connect(s, (void *)&at, sizeof(at))) {
			if (errno != ECONNREFUSED)
				return -1;
			close(s);
			c = s = socket(AF_INET, SOCK_STREAM, 0);
		}
	}
	return c < 0 || setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) ? -1 : c;
}

static int tcp(int answers, int n)
{
	struct timespec start, end;
	int c = tcp_connection(answers), i;
	char byte = 0;

	if (c < 0)
		return errno;
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (i = 0; i < n; i++) {
		if (!answers && write(c, &byte, 1) != 1)
			return errno;
		if (read(c, &byte, 1) != 1)
			return EPIPE;
		if (answers && write(c, &byte, 1) != 1)
			return errno;
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	if (!answers)
		printf("%lld\n", ((end.tv_sec - start.tv_sec) * 1000000000LL + end.tv_nsec - start.tv_nsec) / n);
	return 0;
}

int main(int argc, char **argv)
{
	tmb_object o;
	tmb_sync *s;
	int err;

	if (argc < 4)
		return 255;
	if (!strcmp(argv[1], "tcp"))
		return tcp(!strcmp(argv[2], "pong"), atoi(argv[3]));
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
