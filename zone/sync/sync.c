// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * libtombolo-sync: libtombolo-sync.h is the interface, format/tombolo_sync.h defines the memory and the protocol of sleeping.
 *
 * No value in the area is trusted: indexes and lengths come from this process's own copies, every loop is bounded, every sleep is cut into
 * slices. A hostile member can only do what members may do anyway: post, lock, destroy.
 */
#define _GNU_SOURCE
#include "libtombolo-sync.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tombolo_sync.h"

#define SPINS 100
#define TABLE_PAUSE_NS 10000000 /* the longest pause between two looks at the header's lock */
/*
 * About the time to fall asleep and be woken from another machine: a thread that spins that long before it sleeps takes at most twice as
 * long as the better of the two.
 */
#define SPIN_NS 50000u
#define SPINS_PER_LOOK 16 /* at the clock */
/* First byte of the zone's file whose locks tell which sessions live (after the owner's, 64 members' and the table's). */
#define SESSION_LOCKS 66
#define SEM_MAX 0x7fffffffu

struct tmb_sync {
	struct tmb_sync *next; /* in 'sessions' */
	int fd;		/* the device, or the zone's file with the lock of this session; -1: the session of the process that forked this one */
	bool device;
	bool spins;	/* another process may post meanwhile on another processor, of this machine or not */
	tmb_u8 *map;	/* the whole zone (host) or the area (device) */
	size_t map_len;
	struct tmb_sync_header *h;
	struct tmb_member *members; /* NULL in a guest: the kernel knows who lives */
	tmb_u32 n_objects;
	tmb_u32 member, epoch, session;
	tmb_u64 session_word;
	tmb_u64 lock_word;
	pthread_mutex_t readers_lock;
	struct readers {
		tmb_u32 count, generation; /* of the object that the locks are on */
	} readers[TMB_SYNC_KEYS]; /* read locks of this process, by object */
};

/* --- fork ------------------------------------------------------------------------------------------------------- */

/*
 * A session belongs to the process that opened it, and ends with that: its locks then go to their next owners. A copy of the descriptor or of the mapping
 * would keep the session alive, so a child of fork(2) gets none of the mapping and closes the descriptor at once. Its copies of the sessions refuse
 * everything but tmb_sync_close().
 */
static tmb_sync *sessions;
/* Held across fork, and while a session is opened. Who holds it allocates nothing: an allocator may have fork handlers, too. Nor can it be cancelled. */
static pthread_mutex_t sessions_lock = PTHREAD_MUTEX_INITIALIZER;
static int fork_error;

static bool is_inherited(const tmb_sync *s)
{
	return __atomic_load_n(&s->fd, __ATOMIC_RELAXED) < 0;
}

static void before_fork(void)
{
	pthread_mutex_lock(&sessions_lock);
}

static void after_fork(void)
{
	pthread_mutex_unlock(&sessions_lock);
}

/* open(2) and close(2) are cancellation points. Returns what unlock_sessions() restores. */
static int lock_sessions(void)
{
	int cancel;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	pthread_mutex_lock(&sessions_lock);
	return cancel;
}

static void unlock_sessions(int cancel)
{
	pthread_mutex_unlock(&sessions_lock);
	pthread_setcancelstate(cancel, &cancel);
}

static void after_fork_in_child(void)
{
	for (tmb_sync *s = sessions; s; s = s->next) {
		if (is_inherited(s))
			continue;
		/* Empty memory in its place, if this process may have that: no address that a call still uses becomes another mapping's. */
		if (mmap(s->map, s->map_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE | MAP_NORESERVE, -1, 0) != s->map)
			s->map = MAP_FAILED;
		close(s->fd);
		s->fd = -1;
		s->n_objects = 0;
	}
	after_fork();
}

/*
 * Before the program's own handlers are registered: those run before these at a fork, so a program may hold a lock of its own across fork, and while it
 * opens a session.
 */
static void __attribute__((constructor)) watch_fork(void)
{
	fork_error = pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

/* The error of a handle that is none of this session's objects. */
static int no_object(const tmb_sync *s)
{
	return is_inherited(s) ? -EBADF : -EINVAL;
}

/* --- time and sleeping ---------------------------------------------------------------------------------------- */

static tmb_u64 now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (tmb_u64)ts.tv_sec * 1000000000u + (tmb_u64)ts.tv_nsec;
}

/* Returns the end of a wait; 0: it has none. */
static tmb_u64 deadline_of(int64_t timeout_ns)
{
	tmb_u64 end;

	if (timeout_ns < 0 || __builtin_add_overflow(now_ns(), (tmb_u64)timeout_ns, &end))
		return 0;
	return end;
}

static void futex_wait(tmb_u32 *word, tmb_u32 value, tmb_u64 ns)
{
	struct timespec ts = { .tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u) };

	syscall(SYS_futex, word, FUTEX_WAIT, value, &ts, NULL, 0);
}

static void futex_wake(tmb_u32 *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static struct tmb_sync_object *object_at(tmb_sync *s, tmb_u32 index)
{
	return (struct tmb_sync_object *)((tmb_u8 *)s->h + TMB_SYNC_OBJECTS_OFF) + index;
}

static tmb_u64 *key_at(tmb_sync *s, tmb_u32 index)
{
	return (tmb_u64 *)((tmb_u8 *)s->h + TMB_SYNC_KEYS_OFF) + index;
}

/* Sleeps a slice while *seq_word is seq. -ETIMEDOUT: the deadline is over. index: the object; n_objects: the header's lock. */
static int sleep_on(tmb_sync *s, tmb_u32 index, tmb_u32 *seq_word, tmb_u32 seq, tmb_u64 deadline)
{
	tmb_u64 slice = TMB_SYNC_SLICE_NS, now;

	if (deadline) {
		now = now_ns();
		if (now >= deadline)
			return -ETIMEDOUT;
		if (deadline - now < slice)
			slice = deadline - now;
	}
	if (s->device) {
		struct tmb_sync_wait w = { .object = index, .seq = seq, .timeout_ns = slice };

		if (ioctl(s->fd, TMB_SYNC_IOC_WAIT, &w) && errno == ENODEV)
			return -ENODEV;
	} else {
		futex_wait(seq_word, seq, slice);
	}
	return 0;
}

/* Wakes the sleepers of the members in 'who' on an object. */
static void wake(tmb_sync *s, tmb_u32 index, tmb_u64 who)
{
	struct tmb_sync_object *o = object_at(s, index);
	tmb_u64 own = 1ULL << s->member;
	tmb_u64 host = tmb_load(&s->h->host);
	tmb_u32 host_member = (tmb_state(host) - 1) & 63;

	tmb_fetch_add(&o->seq, 1u);
	if (s->device) {
		struct tmb_sync_wake w = { .object = index, .members = who };

		if (host && who >> host_member & 1)
			tmb_fetch_or(&s->h->host_wake[index / 64], 1ULL << index % 64);
		ioctl(s->fd, TMB_SYNC_IOC_WAKE, &w);
		return;
	}
	if (who & own)
		futex_wake(&o->seq);
	if (who & ~own) {
		tmb_fetch_or(&s->h->ring_mask, who & ~own);
		tmb_fetch_add(&s->h->ring_seq, 1u);
		futex_wake(&s->h->ring_seq);
	}
}

/* Called after a sequentially consistent operation changed the value: wakes the sleepers. */
static inline void wake_waiters(tmb_sync *s, tmb_u32 index)
{
	struct tmb_sync_object *o = object_at(s, index);

	if (__builtin_expect(__atomic_load_n(&o->waiters, __ATOMIC_SEQ_CST) != 0, 0)) {
		tmb_u64 who = tmb_exchange(&o->waiters, 0ULL);

		if (who)
			wake(s, index, who);
	}
}

/* --- who lives -------------------------------------------------------------------------------------------------- */

static bool owner_lives(tmb_sync *s, tmb_u64 word)
{
	tmb_u32 tag = word >> 8 & 0xffffff;
	tmb_u64 expect = tmb_session_word(tmb_lock_owner(word), tag >> 8, word >> 32);

	if (s->members)
		return tmb_sync_owner_lives(s->h, s->members, word);
	/* The kernel and the host free sessions of dead processes and members; a guest can only compare sessions. */
	return tmb_load_acquire(&s->h->sessions[tag & 0xff]) == expect;
}

static bool session_lives(tmb_sync *s, tmb_u32 i)
{
	tmb_u64 word = tmb_load_acquire(&s->h->sessions[i]);

	return s->members ? tmb_session_lives(s->members, word) : word & 1;
}

/* --- lock words: mutexes, and the header's lock ---------------------------------------------------------------------- */

/* Tries once. 1: taken; -EOWNERDEAD: taken from a dead owner; 0: its owner lives. */
static int lock_try(tmb_sync *s, tmb_u64 *word)
{
	tmb_u64 w = 0;

	if (__atomic_compare_exchange_n(word, &w, s->lock_word, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE))
		return 1;
	if (owner_lives(s, w))
		return 0;
	return tmb_cas64(word, w, s->lock_word) ? -EOWNERDEAD : 0;
}

/* Completes an object's destruction, from any point at which a dead process stopped. The caller holds the header's lock. */
static void end_object(tmb_sync *s, tmb_u32 index)
{
	struct tmb_sync_object *o = object_at(s, index);
	tmb_u32 generation;

	tmb_store_release(&s->h->ending, (tmb_u64)index + 1);
	generation = tmb_fetch_add(&o->generation, 1u) + 1;
	/* A semaphore's value carries the generation: a late post or wait fails on it. */
	tmb_store(&o->value, tmb_load(&o->type) == TMB_SEMAPHORE ? (tmb_u64)generation << 32 : 0);
	tmb_store_release(key_at(s, index), 0ULL);
	tmb_store_release(&s->h->ending, 0ULL);
	wake_waiters(s, index);
}

/*
 * Takes the header's lock. Its holder needs microseconds, so waiters yield; if the holder is suspended, they wait until it goes on or is
 * dead. -EINTR: a signal came while this process waited.
 */
static int table_lock(tmb_sync *s)
{
	struct timespec pause = { .tv_nsec = 50000 };
	tmb_u64 ending;
	int spins = 0, got;

	while (!(got = lock_try(s, &s->h->lock))) {
		if (spins++ < SPINS)
			continue;
		if (nanosleep(&pause, NULL) && errno == EINTR)
			return -EINTR;
		if (pause.tv_nsec < TABLE_PAUSE_NS)
			pause.tv_nsec *= 2;
	}
	ending = tmb_load(&s->h->ending);
	if (got == -EOWNERDEAD && ending && ending <= s->n_objects)
		end_object(s, (tmb_u32)(ending - 1));
	return 0;
}

static void table_unlock(tmb_sync *s)
{
	tmb_cas64(&s->h->lock, s->lock_word, 0);
}

static inline int check(tmb_sync *s, tmb_object o, struct tmb_sync_object **out)
{
	if (o.index >= s->n_objects)
		return no_object(s);
	*out = object_at(s, o.index);
	return tmb_load_acquire(&(*out)->generation) == o.generation ? 0 : -EIDRM;
}

/* --- opening -------------------------------------------------------------------------------------------------------- */

static int map_shared(tmb_sync *s)
{
	s->map = mmap(NULL, s->map_len, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);
	return s->map == MAP_FAILED || madvise(s->map, s->map_len, MADV_DONTFORK) ? -errno : 0;
}

static int map_device(tmb_sync *s)
{
	struct tmb_sync_info info;
	int err;

	if (ioctl(s->fd, TMB_SYNC_IOC_INFO, &info))
		return errno == ENOTTY ? -ENODEV : -errno;
	if (info.area_len <= TMB_SYNC_OBJECTS_OFF || info.area_len > SIZE_MAX / 2 || info.member >= TMB_MAX_MEMBERS ||
	    info.session >= TMB_SYNC_SESSIONS)
		return -EUCLEAN;
	s->map_len = (size_t)info.area_len;
	err = map_shared(s);
	if (err)
		return err;
	s->h = (struct tmb_sync_header *)s->map;
	s->member = info.member;
	s->epoch = info.epoch;
	s->session = info.session;
	s->session_word = info.session_word;
	return 0;
}

/* Finds the SYNC area of a zone's header page. 0 or its length and offset. */
static int find_area(const tmb_u8 *zone, tmb_u64 size, tmb_u64 *offset, tmb_u64 *length)
{
	struct tmb_zone_header h;
	tmb_u32 i;

	memcpy(&h, zone, sizeof(h));
	__asm__ volatile("" ::: "memory"); /* only the copy is used from here on */
	if (h.magic != TMB_ZONE_MAGIC || h.version != TMB_ZONE_VERSION || h.incompat)
		return -EPROTONOSUPPORT;
	if (h.size > size || h.n_areas > TMB_MAX_AREAS || h.members_off != sizeof(h))
		return -EUCLEAN;
	for (i = 0; i < h.n_areas; i++) {
		const struct tmb_area *a = &h.areas[i];

		if (a->type != TMB_AREA_SYNC)
			continue;
		if (a->offset % TMB_PAGE || a->offset > h.size || a->length > h.size - a->offset)
			return -EUCLEAN;
		*offset = a->offset;
		*length = a->length;
		return 0;
	}
	return -ENODATA;
}

static int map_zone(tmb_sync *s, tmb_u64 *area_len)
{
	tmb_u64 offset = 0, host;
	struct stat st;
	tmb_u32 i;
	int err;

	if (fstat(s->fd, &st))
		return -errno;
	if ((tmb_u64)st.st_size < TMB_ZONE_MIN)
		return -EPROTONOSUPPORT;
	s->map_len = (size_t)st.st_size;
	err = map_shared(s);
	if (err)
		return err;
	err = find_area(s->map, s->map_len, &offset, area_len);
	if (err)
		return err;
	s->h = (struct tmb_sync_header *)(s->map + offset);
	s->members = (struct tmb_member *)(s->map + sizeof(struct tmb_zone_header));
	if (*area_len <= TMB_SYNC_OBJECTS_OFF)
		return -EUCLEAN;
	host = tmb_load_acquire(&s->h->host);
	s->member = (tmb_state(host) - 1) & 0xff;
	s->epoch = tmb_epoch(host);
	if (!host || !tmb_member_lives(s->members, s->member, s->epoch))
		return -ENOTCONN; /* this zone has no server */
	for (i = 0; i < TMB_SYNC_SESSIONS; i++) {
		struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = SESSION_LOCKS + i, .l_len = 1 };

		if (fcntl(s->fd, F_OFD_SETLK, &lock))
			continue;
		/* A word without a lock on the file: of a host process that died, or of a guest, which has no such lock. */
		s->session_word = tmb_session_take(s->h, s->members, i, s->member, s->epoch);
		if (s->session_word) {
			s->session = i;
			return 0;
		}
		lock.l_type = F_UNLCK;
		fcntl(s->fd, F_OFD_SETLK, &lock);
	}
	return -EUSERS;
}

static int open_session(const char *path, tmb_sync *s)
{
	tmb_u64 area_len, fits;
	struct stat st;
	int err;

	s->map = MAP_FAILED;
	s->fd = open(path, O_RDWR | O_CLOEXEC);
	if (s->fd < 0 || fstat(s->fd, &st)) {
		err = -errno;
		goto fail;
	}
	s->device = S_ISCHR(st.st_mode);
	err = s->device ? map_device(s) : map_zone(s, &area_len);
	if (err)
		goto fail;
	if (s->device)
		area_len = s->map_len;
	fits = (area_len - TMB_SYNC_OBJECTS_OFF) / sizeof(struct tmb_sync_object);
	if (fits > TMB_SYNC_KEYS)
		fits = TMB_SYNC_KEYS;
	s->n_objects = tmb_load(&s->h->n_objects);
	err = -EPROTONOSUPPORT;
	if (tmb_load_acquire(&s->h->magic) != TMB_SYNC_MAGIC || tmb_load(&s->h->version) != TMB_SYNC_VERSION ||
	    tmb_load(&s->h->incompat))
		goto fail;
	err = -EUCLEAN;
	if (!s->n_objects || s->n_objects > fits)
		goto fail;
	if (!s->device) /* in a guest the kernel has done it */
		tmb_session_clear_reads(s->h, s->n_objects, s->session);
	pthread_mutex_init(&s->readers_lock, NULL);
	s->lock_word = tmb_lock_word(s->member, s->epoch, tmb_session_tag(s->session, s->session_word));
	s->next = sessions;
	sessions = s;
	return 0;
fail:
	if (s->session_word && !s->device)
		tmb_session_free(s->h, s->session, s->session_word);
	if (s->map != MAP_FAILED)
		munmap(s->map, s->map_len);
	if (s->fd >= 0)
		close(s->fd);
	return err;
}

int tmb_sync_open(const char *path, tmb_sync **out)
{
	tmb_sync *s;
	int err, cancel;

	if (fork_error)
		return -fork_error;
	s = calloc(1, sizeof(*s));
	if (!s)
		return -ENOMEM;
	cancel = lock_sessions();
	err = open_session(path, s);
	unlock_sessions(cancel);
	if (err) {
		free(s);
		return err;
	}
	s->spins = s->device || sysconf(_SC_NPROCESSORS_ONLN) > 1;
	*out = s;
	return 0;
}

void tmb_sync_close(tmb_sync *s)
{
	tmb_sync **link = &sessions;
	int cancel = lock_sessions();

	while (*link != s)
		link = &(*link)->next;
	*link = s->next;
	/* Locks that this session still holds go to their next owner with -EOWNERDEAD. In a guest the kernel does this. */
	if (!s->device && !is_inherited(s))
		tmb_session_free(s->h, s->session, s->session_word);
	if (s->map != MAP_FAILED)
		munmap(s->map, s->map_len);
	if (!is_inherited(s)) {
		struct flock lock = { .l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = SESSION_LOCKS + s->session, .l_len = 1 };

		/* A process that is being started has a copy of the descriptor until its exec. */
		if (!s->device)
			fcntl(s->fd, F_OFD_SETLK, &lock);
		close(s->fd);
	}
	unlock_sessions(cancel);
	pthread_mutex_destroy(&s->readers_lock);
	free(s);
}

/* --- names ------------------------------------------------------------------------------------------------------------ */

/* FNV-1a, never 0. */
static tmb_u64 hash(const char *name, size_t len)
{
	tmb_u64 h = 0xcbf29ce484222325ULL;

	while (len--)
		h = (h ^ (tmb_u8)*name++) * 0x100000001b3ULL;
	return h ? h : 1;
}

static tmb_u32 window_at(tmb_sync *s, tmb_u64 key, tmb_u32 i)
{
	return (tmb_u32)((key + i) % s->n_objects);
}

/* Finds the object of a name: its index and, copied while the name was there, its type and generation. -ENOENT. */
static int find(tmb_sync *s, const char *name, tmb_u64 key, tmb_u32 *type, tmb_object *out)
{
	size_t len = strlen(name);
	char copy[TMB_SYNC_NAME];
	tmb_u32 i;

	for (i = 0; i < TMB_SYNC_WINDOW && i < s->n_objects; i++) {
		tmb_u32 index = window_at(s, key, i);
		struct tmb_sync_object *o = object_at(s, index);

		if (tmb_load_acquire(key_at(s, index)) != key)
			continue;
		out->index = index;
		out->generation = tmb_load_acquire(&o->generation);
		*type = tmb_load(&o->type);
		memcpy(copy, o->name, sizeof(copy));
		__atomic_thread_fence(__ATOMIC_ACQUIRE);
		if (tmb_load(key_at(s, index)) == key && !memcmp(copy, name, len + 1))
			return 0;
	}
	return -ENOENT;
}

static int name_ok(const tmb_sync *s, const char *name)
{
	size_t len = strnlen(name, TMB_SYNC_NAME);

	if (is_inherited(s))
		return -EBADF;
	return len >= 1 && len < TMB_SYNC_NAME ? 0 : -ENAMETOOLONG;
}

int tmb_sync_lookup(tmb_sync *s, enum tmb_sync_type type, const char *name, tmb_object *out)
{
	tmb_u32 found;
	int err = name_ok(s, name);

	if (!err)
		err = find(s, name, hash(name, strlen(name)), &found, out);
	if (!err && found != type)
		err = -EINVAL;
	return err;
}

/* Returns whether the values of both types are lock words. */
static bool is_alike(tmb_u32 a, tmb_u32 b)
{
	return a == b || (a == TMB_MUTEX && b == TMB_RWLOCK) || (a == TMB_RWLOCK && b == TMB_MUTEX);
}

/*
 * Finds a free place for an object: if there is one, a place that had only objects whose value means the same. An operation on a destroyed object may
 * come so late that it changes the value of that object's successor; of a lock or a semaphore it can tell.
 */
static int find_place(tmb_sync *s, tmb_u32 type, tmb_u64 key, tmb_u32 *index)
{
	int err = -ENOSPC;
	tmb_u32 i;

	for (i = 0; i < TMB_SYNC_WINDOW && i < s->n_objects; i++) {
		tmb_u32 at = window_at(s, key, i), had = tmb_load(&object_at(s, at)->type);

		if (tmb_load_acquire(key_at(s, at)))
			continue;
		if (err)
			*index = at;
		err = 0;
		if (!had || is_alike(had, type)) {
			*index = at;
			break;
		}
	}
	return err;
}

static void make_object(tmb_sync *s, tmb_u32 type, const char *name, tmb_u64 initial, tmb_object at)
{
	struct tmb_sync_object *o = object_at(s, at.index);

	tmb_store(&o->type, type);
	memset(o->name, 0, sizeof(o->name));
	memcpy(o->name, name, strlen(name));
	memset(o->readers, 0, sizeof(o->readers));
	tmb_store(&o->waiters, 0ULL);
	tmb_store(&o->value, type == TMB_SEMAPHORE ? (tmb_u64)at.generation << 32 | initial : type == TMB_EVENT ? initial : 0);
}

int tmb_sync_create(tmb_sync *s, enum tmb_sync_type type, const char *name, uint64_t initial, tmb_object *out)
{
	tmb_u32 found;
	tmb_u64 key;
	int err = name_ok(s, name);

	if (err)
		return err;
	if (type < TMB_SEMAPHORE || type > TMB_EVENT || (type == TMB_SEMAPHORE && initial > SEM_MAX))
		return -EINVAL;
	key = hash(name, strlen(name));
	err = table_lock(s);
	if (err)
		return err;
	err = find(s, name, key, &found, out) ? find_place(s, type, key, &out->index) : -EEXIST;
	if (!err) {
		out->generation = tmb_load(&object_at(s, out->index)->generation);
		make_object(s, type, name, initial, *out);
		tmb_store_release(key_at(s, out->index), key);
	}
	table_unlock(s);
	return err;
}

int tmb_sync_destroy(tmb_sync *s, const char *name)
{
	tmb_object at;
	tmb_u32 type;
	int err = name_ok(s, name);

	if (!err)
		err = table_lock(s);
	if (err)
		return err;
	err = find(s, name, hash(name, strlen(name)), &type, &at);
	if (!err)
		end_object(s, at.index);
	table_unlock(s);
	return err;
}

/* --- semaphores --------------------------------------------------------------------------------------------------------- */

int tmb_sem_post(tmb_sync *s, tmb_object at)
{
	struct tmb_sync_object *o;
	tmb_u64 v;

	if (at.index >= s->n_objects)
		return no_object(s);
	o = object_at(s, at.index);
	v = tmb_load(&o->value);
	do {
		if (v >> 32 != at.generation || tmb_load_acquire(&o->generation) != at.generation)
			return -EIDRM;
		if ((v & 0xffffffff) >= SEM_MAX)
			return -EOVERFLOW;
	} while (!__atomic_compare_exchange_n(&o->value, &v, v + 1, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
	wake_waiters(s, at.index);
	return 0;
}

/* Returns 1: taken; 0: the count is 0. */
static inline int sem_try(struct tmb_sync_object *o, tmb_u32 generation)
{
	tmb_u64 v = __atomic_load_n(&o->value, __ATOMIC_SEQ_CST);

	do {
		/* Also the object's own: in the value of another type these bits mean something else. */
		if (v >> 32 != generation || tmb_load_acquire(&o->generation) != generation)
			return -EIDRM;
		if (!(v & 0xffffffff))
			return 0;
	} while (!__atomic_compare_exchange_n(&o->value, &v, v - 1, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
	return 1;
}

/*
 * The loop in which all operations wait: tries, announces itself, tries again, sleeps. 'try_it' returns 0 to continue.
 */
typedef int (*try_fn)(tmb_sync *s, struct tmb_sync_object *o, tmb_object at, tmb_u64 arg);

/* -EBADF: this is a child that a signal handler of the waiting thread has forked; what it tries in empty memory means nothing. */
static inline int attempt(tmb_sync *s, struct tmb_sync_object *o, tmb_object at, tmb_u64 arg, try_fn try_it)
{
	int got = is_inherited(s) ? -EBADF : try_it(s, o, at, arg);

	return is_inherited(s) ? -EBADF : got;
}

static int wait_for(tmb_sync *s, struct tmb_sync_object *o, tmb_object at, tmb_u64 arg, int64_t timeout_ns, try_fn try_it)
{
	tmb_u64 deadline = deadline_of(timeout_ns), since = 0;
	int i, got;

	for (i = 1; s->spins && timeout_ns != 0; i++) {
		got = attempt(s, o, at, arg, try_it);
		if (got)
			return got;
		if (i % SPINS_PER_LOOK == 0) {
			tmb_u64 now = now_ns();

			since = since ? since : now;
			if (now - since >= SPIN_NS || (deadline && now >= deadline))
				break;
		}
		__builtin_ia32_pause();
	}
	for (;;) {
		tmb_u32 seq;

		if (is_inherited(s))
			return -EBADF;
		seq = tmb_load_acquire(&o->seq);
		tmb_fetch_or(&o->waiters, 1ULL << s->member);
		got = attempt(s, o, at, arg, try_it);
		if (got)
			return got;
		got = sleep_on(s, at.index, &o->seq, seq, deadline);
		if (got)
			return got;
	}
}

static int try_sem(tmb_sync *s, struct tmb_sync_object *o, tmb_object at, tmb_u64 arg)
{
	(void)s, (void)arg;
	return sem_try(o, at.generation);
}

static int result(int got)
{
	return got > 0 ? 0 : got;
}

int tmb_sem_wait(tmb_sync *s, tmb_object at, int64_t timeout_ns)
{
	struct tmb_sync_object *o;
	int got;

	if (at.index >= s->n_objects)
		return no_object(s);
	o = object_at(s, at.index);
	got = sem_try(o, at.generation);
	if (!got)
		got = wait_for(s, o, at, 0, timeout_ns, try_sem);
	return result(got);
}

int tmb_sem_value(tmb_sync *s, tmb_object at, uint32_t *value)
{
	struct tmb_sync_object *o;
	int err = check(s, at, &o);

	if (!err)
		*value = (uint32_t)tmb_load(&o->value);
	return err;
}

/* --- mutexes ------------------------------------------------------------------------------------------------------------- */

/* Gives a lock back that lock_try() took. A dead owner's word is restored, since no process was told of the death yet. */
static void give_back(tmb_sync *s, tmb_u32 index, int got)
{
	tmb_cas64(&object_at(s, index)->value, s->lock_word, got == -EOWNERDEAD ? tmb_lock_word(TMB_MAX_MEMBERS, 0, 0) : 0);
	wake_waiters(s, index);
}

static int try_mutex(tmb_sync *s, struct tmb_sync_object *o, tmb_object at, tmb_u64 arg)
{
	int got;

	(void)arg;
	if (tmb_load_acquire(&o->generation) != at.generation)
		return -EIDRM;
	got = lock_try(s, &o->value);
	/* Destroyed and created again in between: another object. */
	if (got && tmb_load_acquire(&o->generation) != at.generation) {
		give_back(s, at.index, got);
		return -EIDRM;
	}
	return got;
}

int tmb_mutex_lock(tmb_sync *s, tmb_object at, int64_t timeout_ns)
{
	struct tmb_sync_object *o;
	int got = check(s, at, &o);

	if (got)
		return got;
	got = try_mutex(s, o, at, 0);
	if (!got)
		got = wait_for(s, o, at, 0, timeout_ns, try_mutex);
	return result(got);
}

int tmb_mutex_unlock(tmb_sync *s, tmb_object at)
{
	struct tmb_sync_object *o;
	int err = check(s, at, &o);

	if (err)
		return err;
	if (!tmb_cas64(&o->value, s->lock_word, 0))
		return -EPERM;
	wake_waiters(s, at.index);
	return 0;
}

/* --- read-write locks ---------------------------------------------------------------------------------------------------- */

static int try_read(tmb_sync *s, struct tmb_sync_object *o, tmb_object at, tmb_u64 arg)
{
	tmb_u64 *word = &o->readers[s->session / 64], bit = 1ULL << s->session % 64, writer;
	struct readers *own = &s->readers[at.index]; /* of a destroyed object: as if there were none */
	bool was_shown = false;
	int got = 0;

	(void)arg;
	/* The bit stands for all threads of this process: one at a time sets or clears it. */
	pthread_mutex_lock(&s->readers_lock);
	writer = __atomic_load_n(&o->value, __ATOMIC_SEQ_CST);
	if (tmb_load_acquire(&o->generation) != at.generation) {
		got = -EIDRM;
	} else if (own->count && own->generation == at.generation) {
		own->count++;
		got = 1;
	} else if (!writer || !owner_lives(s, writer)) { /* else no bit: taking it back wakes all waiters, this one too */
		tmb_fetch_or(word, bit);
		writer = __atomic_load_n(&o->value, __ATOMIC_SEQ_CST);
		if (tmb_load_acquire(&o->generation) != at.generation)
			got = -EIDRM; /* destroyed, and maybe created again */
		else if (!writer)
			got = 1;
		else if (!owner_lives(s, writer))
			got = -EOWNERDEAD;
		if (got && got != -EIDRM) {
			*own = (struct readers){ .count = 1, .generation = at.generation };
		} else {
			tmb_fetch_and(word, ~bit);
			was_shown = true;
		}
	}
	pthread_mutex_unlock(&s->readers_lock);
	if (was_shown) /* a writer may have gone to sleep because of the bit */
		wake_waiters(s, at.index);
	return got;
}

int tmb_rwlock_rdlock(tmb_sync *s, tmb_object at, int64_t timeout_ns)
{
	struct tmb_sync_object *o;
	int got = check(s, at, &o);

	if (got)
		return got;
	got = try_read(s, o, at, 0);
	if (!got)
		got = wait_for(s, o, at, 0, timeout_ns, try_read);
	return result(got);
}

int tmb_rwlock_rdunlock(tmb_sync *s, tmb_object at)
{
	struct tmb_sync_object *o;
	struct readers *own;
	bool held, last;
	int err;

	if (at.index >= s->n_objects)
		return no_object(s);
	err = check(s, at, &o);
	own = &s->readers[at.index];
	pthread_mutex_lock(&s->readers_lock);
	held = own->count && own->generation == at.generation;
	last = held && --own->count == 0;
	if (last)
		tmb_fetch_and(&o->readers[s->session / 64], ~(1ULL << s->session % 64));
	pthread_mutex_unlock(&s->readers_lock);
	if (last)
		wake_waiters(s, at.index);
	return err ? err : held ? 0 : -EPERM;
}

/* Returns whether no reader is left; removes those of dead sessions. The caller holds the lock word. */
static int try_no_readers(tmb_sync *s, struct tmb_sync_object *o, tmb_object at, tmb_u64 arg)
{
	tmb_u32 i, b;

	(void)arg;
	if (tmb_load_acquire(&o->generation) != at.generation)
		return -EIDRM;
	for (i = 0; i < TMB_SYNC_SESSIONS / 64; i++) {
		tmb_u64 word = __atomic_load_n(&o->readers[i], __ATOMIC_SEQ_CST);

		for (b = 0; word && b < 64; b++) {
			if (!(word >> b & 1))
				continue;
			if (session_lives(s, i * 64 + b))
				return 0;
			tmb_fetch_and(&o->readers[i], ~(1ULL << b));
		}
	}
	return 1;
}

int tmb_rwlock_wrlock(tmb_sync *s, tmb_object at, int64_t timeout_ns)
{
	tmb_u64 deadline = deadline_of(timeout_ns), now;
	struct tmb_sync_object *o;
	int locked = check(s, at, &o), got;

	if (locked)
		return locked;
	locked = try_mutex(s, o, at, 0);
	if (!locked)
		locked = wait_for(s, o, at, 0, timeout_ns, try_mutex);
	if (locked <= 0 && locked != -EOWNERDEAD)
		return locked;
	if (deadline) {
		now = now_ns();
		timeout_ns = now < deadline ? (int64_t)(deadline - now) : 0;
	}
	got = wait_for(s, o, at, 0, timeout_ns, try_no_readers);
	if (got > 0)
		return result(locked);
	/*
	 * The wait ended: readers that wait for this writer go on. If the object was destroyed, its word is no lock of this writer's: the successor's may
	 * already be another thread's of this process.
	 */
	if (!is_inherited(s) && tmb_load_acquire(&o->generation) == at.generation)
		give_back(s, at.index, locked);
	return got;
}

int tmb_rwlock_wrunlock(tmb_sync *s, tmb_object at)
{
	return tmb_mutex_unlock(s, at);
}

/* --- event counters -------------------------------------------------------------------------------------------------------- */

int tmb_event_advance(tmb_sync *s, tmb_object at, uint64_t by)
{
	struct tmb_sync_object *o;
	int err = check(s, at, &o);

	if (err)
		return err;
	tmb_fetch_add(&o->value, by);
	wake_waiters(s, at.index);
	return 0;
}

int tmb_event_read(tmb_sync *s, tmb_object at, uint64_t *count)
{
	struct tmb_sync_object *o;
	int err = check(s, at, &o);

	if (!err)
		*count = tmb_load_acquire(&o->value);
	return err;
}

static int try_event(tmb_sync *s, struct tmb_sync_object *o, tmb_object at, tmb_u64 at_least)
{
	tmb_u64 count = __atomic_load_n(&o->value, __ATOMIC_SEQ_CST);

	(void)s;
	if (tmb_load_acquire(&o->generation) != at.generation)
		return -EIDRM;
	return count >= at_least;
}

int tmb_event_await(tmb_sync *s, tmb_object at, uint64_t at_least, int64_t timeout_ns)
{
	struct tmb_sync_object *o;
	int err = check(s, at, &o);

	return err ? err : result(wait_for(s, o, at, at_least, timeout_ns, try_event));
}

/* --- serving ------------------------------------------------------------------------------------------------------------------ */

int tmb_sync_serve(void *area, size_t len, uint32_t member, uint32_t epoch)
{
	struct tmb_sync_header *h = area;
	size_t fits;

	if (len < TMB_SYNC_OBJECTS_OFF + sizeof(struct tmb_sync_object) || member >= TMB_MAX_MEMBERS)
		return -EINVAL;
	fits = (len - TMB_SYNC_OBJECTS_OFF) / sizeof(struct tmb_sync_object);
	if (tmb_load_acquire(&h->magic) != TMB_SYNC_MAGIC) {
		memset(area, 0, len);
		tmb_store(&h->version, (tmb_u32)TMB_SYNC_VERSION);
		tmb_store(&h->n_objects, (tmb_u32)(fits < TMB_SYNC_KEYS ? fits : TMB_SYNC_KEYS));
		tmb_store_release(&h->magic, TMB_SYNC_MAGIC);
	} else if (tmb_load(&h->version) != TMB_SYNC_VERSION || tmb_load(&h->incompat)) {
		return -EPROTONOSUPPORT;
	}
	tmb_store_release(&h->host, tmb_state_epoch(member + 1, epoch));
	return 0;
}

int tmb_sync_requests(tmb_sync *s, int64_t timeout_ns, uint64_t *mask)
{
	tmb_u32 seq;

	if (s->device || is_inherited(s))
		return no_object(s);
	seq = tmb_load_acquire(&s->h->ring_seq);
	*mask = tmb_exchange(&s->h->ring_mask, 0ULL);
	if (*mask)
		return 0;
	futex_wait(&s->h->ring_seq, seq, timeout_ns < 0 ? TMB_SYNC_SLICE_NS : (tmb_u64)timeout_ns);
	*mask = tmb_exchange(&s->h->ring_mask, 0ULL);
	return 0;
}

void tmb_sync_interrupt(tmb_sync *s)
{
	if (is_inherited(s))
		return;
	tmb_fetch_add(&s->h->ring_seq, 1u);
	futex_wake(&s->h->ring_seq);
}

void tmb_sync_rang(tmb_sync *s)
{
	tmb_u32 i, b;

	if (is_inherited(s))
		return;
	for (i = 0; i < TMB_SYNC_KEYS / 64; i++) {
		tmb_u64 word = tmb_load(&s->h->host_wake[i]) ? tmb_exchange(&s->h->host_wake[i], 0ULL) : 0;

		for (b = 0; word && b < 64; b++)
			if (word >> b & 1 && i * 64 + b < s->n_objects)
				futex_wake(&object_at(s, i * 64 + b)->seq);
	}
}

int tmb_sync_reap(tmb_sync *s)
{
	int freed = 0;
	tmb_u32 i;

	if (is_inherited(s))
		return -EBADF;
	for (i = 0; i < TMB_SYNC_SESSIONS; i++) {
		struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = SESSION_LOCKS + i, .l_len = 1 };
		tmb_u64 word = tmb_load_acquire(&s->h->sessions[i]);

		if (!(word & 1) || i == s->session)
			continue;
		if (tmb_session_lives(s->members, word)) {
			if ((word >> 8 & 0xff) != s->member)
				continue; /* a guest's: its kernel frees it */
			if (fcntl(s->fd, F_OFD_GETLK, &lock) || lock.l_type != F_UNLCK)
				continue;
		}
		tmb_session_free(s->h, i, word);
		freed++;
	}
	return freed;
}
