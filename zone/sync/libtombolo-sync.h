/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Semaphores, mutexes, read-write locks and event counters shared by processes of virtual machines and their host
 * (libtombolo-sync, tombolo-sync(3)).
 *
 * Functions return 0 or a negative errno. Timeouts are in nanoseconds, relative; below 0: for ever, 0: don't sleep. All functions may be
 * called from several threads at once. -EIDRM: the object was destroyed. -EUCLEAN: the shared memory is damaged. In a guest SIGBUS: its zone was
 * unmounted.
 */
#ifndef LIBTOMBOLO_SYNC_H
#define LIBTOMBOLO_SYNC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tmb_sync tmb_sync;
/* An object, as long as it is not destroyed. Plain data. */
typedef struct {
	uint32_t index, generation;
} tmb_object;

enum tmb_sync_type { TMB_SEMAPHORE = 1, TMB_MUTEX = 2, TMB_RWLOCK = 3, TMB_EVENT = 4 };

/* In a guest: a device /dev/tombolo-sync*; on the host: the zone's file, or /proc/PID/fd/N of its memfd. One session per process.
 * A child of fork(2) opens its own: with its copy of the parent's all functions return -EBADF, but tmb_sync_close(), which leaves the parent's open. */
int tmb_sync_open(const char *path, tmb_sync **out);
void tmb_sync_close(tmb_sync *s);

/* name: 1 to 47 bytes. initial: a semaphore's or event's first count, else 0. -EEXIST, -ENOSPC. -EINTR, as tmb_sync_destroy: a signal came while
 * another, living process was creating or destroying. */
int tmb_sync_create(tmb_sync *s, enum tmb_sync_type type, const char *name, uint64_t initial, tmb_object *out);
/* -ENOENT; -EINVAL: the name is an object of another type. */
int tmb_sync_lookup(tmb_sync *s, enum tmb_sync_type type, const char *name, tmb_object *out);
/* Sleepers wake with -EIDRM. -ENOENT, -EINTR. */
int tmb_sync_destroy(tmb_sync *s, const char *name);

int tmb_sem_post(tmb_sync *s, tmb_object o); /* -EOVERFLOW beyond 2^31-1 */
int tmb_sem_wait(tmb_sync *s, tmb_object o, int64_t timeout_ns); /* -ETIMEDOUT */
int tmb_sem_value(tmb_sync *s, tmb_object o, uint32_t *value);

/* -EOWNERDEAD: locked, but its last owner died with it: the caller repairs the data that it protects. Not recursive. */
int tmb_mutex_lock(tmb_sync *s, tmb_object o, int64_t timeout_ns);
int tmb_mutex_unlock(tmb_sync *s, tmb_object o); /* -EPERM: this process does not hold it */

/*
 * A writer that waits comes before readers of other processes. A process that has it locked for reading may lock it again at once, in any thread, so a
 * process whose threads' locks overlap without end keeps writers out. -EOWNERDEAD: locked, but the last writer died with it; readers get this
 * until a writer has locked and unlocked it.
 */
int tmb_rwlock_rdlock(tmb_sync *s, tmb_object o, int64_t timeout_ns);
int tmb_rwlock_wrlock(tmb_sync *s, tmb_object o, int64_t timeout_ns);
int tmb_rwlock_rdunlock(tmb_sync *s, tmb_object o);
int tmb_rwlock_wrunlock(tmb_sync *s, tmb_object o);

/* An event counter only grows. */
int tmb_event_advance(tmb_sync *s, tmb_object o, uint64_t by);
int tmb_event_read(tmb_sync *s, tmb_object o, uint64_t *count);
int tmb_event_await(tmb_sync *s, tmb_object o, uint64_t at_least, int64_t timeout_ns);

/* --- for the process that serves the zone (tombolo itself) --------------------------------------------------- */

/* Initializes the area, if needed, and declares 'member' in 'epoch' to be the host. area: mapped for writing. */
int tmb_sync_serve(void *area, size_t len, uint32_t member, uint32_t epoch);
/* Waits for requests to ring members, *mask: bit per member. May return 0 with an empty mask. */
int tmb_sync_requests(tmb_sync *s, int64_t timeout_ns, uint64_t *mask);
/* Ends such a wait. */
void tmb_sync_interrupt(tmb_sync *s);
/* Called when the host's doorbell rang: wakes sleepers on the host. */
void tmb_sync_rang(tmb_sync *s);
/* Frees sessions of dead host processes; returns how many. */
int tmb_sync_reap(tmb_sync *s);

#ifdef __cplusplus
}
#endif
#endif
