// SPDX-License-Identifier: Apache-2.0 OR MIT
/* cancelled ZONE: threads are cancelled as they open and close sessions; afterwards the process forks and opens a session. Exit status: 0. */
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "libtombolo-sync.h"

static const char *zone;

static void *opens(void *session)
{
	pthread_cancel(pthread_self());
	tmb_sync_open(zone, session);
	pthread_testcancel();
	return NULL;
}

static void *closes(void *session)
{
	pthread_cancel(pthread_self());
	tmb_sync_close(*(tmb_sync **)session);
	pthread_testcancel();
	return NULL;
}

static int is_cancelled(void *(*work)(void *), tmb_sync **session)
{
	pthread_t thread;
	void *end;

	return !pthread_create(&thread, NULL, work, session) && !pthread_join(thread, &end) && end == PTHREAD_CANCELED;
}

int main(int argc, char **argv)
{
	tmb_sync *first = NULL, *second;
	int status;

	if (argc != 2)
		return 2;
	zone = argv[1];
	alarm(20);
	if (!is_cancelled(opens, &first) || !first || !is_cancelled(closes, &first))
		return 1;
	if (!fork())
		_exit(0);
	if (wait(&status) < 0 || status || tmb_sync_open(zone, &second))
		return 1;
	tmb_sync_close(second);
	return 0;
}
