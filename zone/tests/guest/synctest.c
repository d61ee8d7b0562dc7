// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Uses the semaphores of a zone from a shell: synctest DEVICE COMMAND NAME|N. Exit status: 0, or the errno. To compare: `synctest tcp
 * pong N` and `synctest tcp ping N` send a byte there and back over TCP, between the addresses 10.0.0.1 and any. A number after N: ping rests
 * so many microseconds before each round trip, which do not count, so that the other side is asleep.
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

/* The clock at the beginning of a round trip, after a rest of 'us' microseconds. */
static long long begin(int us)
{
	struct timespec t;

	if (us)
		usleep(us);
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

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

static int ping(tmb_sync *s, int n, int rest)
{
	tmb_object ping, pong;
	int err = tmb_sync_lookup(s, TMB_SEMAPHORE, "ping", &ping), i;
	long long sum = 0;

	if (!err)
		err = tmb_sync_lookup(s, TMB_SEMAPHORE, "pong", &pong);
	for (i = 0; !err && i < n; i++) {
		long long start = begin(rest);

		err = tmb_sem_post(s, ping);
		if (!err)
			err = tmb_sem_wait(s, pong, LONG);
		sum += begin(0) - start;
	}
	printf("%lld\n", sum / n);
	return err;
}

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

static int tcp(int answers, int n, int rest)
{
	int c = tcp_connection(answers), i;
	long long sum = 0;
	char byte = 0;

	if (c < 0)
		return errno;
	for (i = 0; i < n; i++) {
		long long start = begin(rest);

		if (!answers && write(c, &byte, 1) != 1)
			return errno;
		if (read(c, &byte, 1) != 1)
			return EPIPE;
		if (answers && write(c, &byte, 1) != 1)
			return errno;
		sum += begin(0) - start;
	}
	if (!answers)
		printf("%lld\n", sum / n);
	return 0;
}

int main(int argc, char **argv)
{
	int rest = argc > 4 ? atoi(argv[4]) : 0;
	tmb_object o;
	tmb_sync *s;
	int err;

	if (argc < 4)
		return 255;
	if (!strcmp(argv[1], "tcp"))
		return tcp(!strcmp(argv[2], "pong"), atoi(argv[3]), rest);
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
	} else if (!strcmp(argv[2], "later")) {
		/* Takes the lock once /go is there. */
		err = tmb_sync_lookup(s, TMB_MUTEX, argv[3], &o);
		if (!err) {
			puts("ready");
			fflush(stdout);
			while (access("/go", F_OK))
				usleep(1000);
			err = tmb_mutex_lock(s, o, LONG);
		}
	} else if (!strcmp(argv[2], "ping")) {
		err = ping(s, atoi(argv[3]), rest);
	} else if (!strcmp(argv[2], "pong")) {
		err = pong(s, atoi(argv[3]));
	} else {
		err = -255;
	}
	/* Without tmb_sync_close: the kernel must end the session. */
	return -err;
}
