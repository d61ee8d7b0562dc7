// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The lock across members, and waiting. tfs_format.h defines the lock word.
 *
 * Without waiters, taking and releasing a lock is one compare and swap each. A thread that finds it taken spins a little, then enters its
 * member's queue for this lock, which is private memory and in the order of arrival. The first of a queue acts for its member: it announces
 * the member in 'waiters' and sleeps. An unlock wakes the next member, which may find that another one has taken the lock. If the first of a
 * queue wakes in vain, it demands the lock: the owner's unlock then does not free it but offers it to the next member in 'waiters' after the
 * last one it was offered to. So each other member passes a waiting member at most once.
 *
 * An offer is no ownership. It ends when its member takes it, when that member is dead, or when the member has not come within OFFER_NS, like
 * a suspended one: then any waiter takes the lock. So neither dead nor suspended waiters block a lock. A dead owner's lock is taken over once
 * its transactions are recovered.
 *
 * Waiting for a living owner ends only by a signal. After ASK_NS the waiter rings the owner and logs whether it answers.
 *
 * files/host/tests/lock_model.rs explores this protocol; its steps have the names in the comments here.
 */
#include "tfs_internal.h"

#define SPINS 200u
#define NAP_MIN_NS (50ULL * 1000)
#define NAP_MAX_NS (10ULL * 1000 * 1000) /* a doorbell may be missing, or its ringer dead */
#define OFFER_NS (50ULL * 1000 * 1000)
#define ASK_NS (1000ULL * 1000 * 1000)
#define TELL_NS (2 * ASK_NS)
#define SURE_NS (5 * ASK_NS)

/* --- words ------------------------------------------------------------------------------------------------------- */

static tmb_u64 tfs_field(tmb_u64 word, tmb_u64 mask)
{
	return (word & mask) >> __builtin_ctzll(mask);
}

static tmb_u64 tfs_with(tmb_u64 word, tmb_u64 mask, tmb_u64 value)
{
	return (word & ~mask) | (value << __builtin_ctzll(mask) & mask);
}

static bool tfs_is_own(struct tfs *fs, tmb_u64 word)
{
	return (word & ~TFS_LOCK_TAG) == tmb_lock_word(fs->member, fs->epoch, 0);
}

static tmb_u32 tfs_epoch_of(tmb_u64 word)
{
	return (tmb_u32)(word >> 32);
}

bool tfs_lock_held(const struct tmb_lock *lock, tmb_u32 *owner)
{
	tmb_u64 now = tmb_load(&lock->word);

	*owner = tmb_lock_owner(now);
	return now & 0xff && (now & TFS_LOCK_KIND) == TFS_LOCK_HELD;
}

/* --- queues of this member's own threads ------------------------------------------------------------------------------- */

/* The lock's id in a queue. */
static tmb_u64 tfs_id_of(struct tmb_lock *lock)
{
	return (tmb_u64)(unsigned long)lock;
}

/* Enters the queue; NULL: it is full. */
static struct tfs_waiter *tfs_enqueue(struct tfs *fs, struct tmb_lock *lock)
{
	for (tmb_u32 i = 0; i < TFS_QUEUE; i++) {
		struct tfs_waiter *w = &fs->queue[i];

		if (tmb_load(&w->lock) || !tmb_cas64(&w->lock, 0, tfs_id_of(lock)))
			continue;
		tmb_store_release(&w->number, tmb_fetch_add(&fs->numbers, 1) + 1);
		return w;
	}
	return NULL;
}

static void tfs_dequeue(struct tfs_waiter *w)
{
	tmb_store(&w->number, 0);
	tmb_store_release(&w->lock, 0);
}

static struct tfs_waiter *tfs_first_of(struct tfs *fs, tmb_u64 lock)
{
	struct tfs_waiter *first = NULL;
	tmb_u64 lowest = 0;

	for (tmb_u32 i = 0; i < TFS_QUEUE; i++) {
		struct tfs_waiter *w = &fs->queue[i];
		tmb_u64 number;

		if (tmb_load_acquire(&w->lock) != lock)
			continue;
		number = tmb_load_acquire(&w->number); /* 0: a thread that is just entering, and comes after this one */
		if (!first || (number && (!lowest || number < lowest))) {
			first = w;
			lowest = number;
		}
	}
	return first;
}

static void tfs_wake(struct tfs *fs, struct tfs_waiter *w)
{
	tmb_fetch_add(&w->bell, 1);
	tfs_os_wake(fs, &w->bell);
}

void tfs_rang(struct tfs *fs)
{
	for (tmb_u32 i = 0; i < TFS_QUEUE; i++) {
		tmb_u64 lock = tmb_load_acquire(&fs->queue[i].lock);

		if (lock && tfs_first_of(fs, lock) == &fs->queue[i])
			tfs_wake(fs, &fs->queue[i]);
	}
}

/* Wakes the first of a member's queue. */
static void tfs_ring(struct tfs *fs, struct tmb_lock *lock, tmb_u32 member)
{
	struct tfs_waiter *w;

	if (member != fs->member) {
		tfs_ring_members(fs, 1ULL << member, TMB_PENDING_LOCK);
		return;
	}
	w = tfs_first_of(fs, tfs_id_of(lock));
	if (w)
		tfs_wake(fs, w);
}

/* --- waiting ------------------------------------------------------------------------------------------------------------ */

void tfs_wait_start(struct tfs_wait *w, enum tfs_how how)
{
	*w = (struct tfs_wait){.how = how, .started = tfs_os_clock()};
	w->changed = w->started;
	w->tell = TELL_NS;
}

/* Rings an owner that has not released for long, and logs it, ever less often. */
static void tfs_ask(struct tfs *fs, struct tfs_wait *w, tmb_u64 clock, tmb_u32 owner)
{
	tmb_u64 waited = clock - w->changed;
	bool answers = owner == fs->member;

	if (owner >= TFS_MEMBERS || !fs->members || waited < ASK_NS)
		return;
	if (!w->asked) {
		w->asked = true;
		tfs_ring_members(fs, 1ULL << owner, TMB_PENDING_LOCK);
	}
	if (waited < w->tell)
		return;
	w->tell *= 4;
	/* A running member clears its pending bits. */
	answers = answers || !(tmb_load(&fs->members[owner].pending) & TMB_PENDING_LOCK);
	tfs_os_waiting(fs, owner, answers, waited / ASK_NS);
	w->asked = !answers;
}

int tfs_wait_more(struct tfs *fs, struct tfs_wait *w, tmb_u64 seen, tmb_u32 owner, tmb_u32 *bell, tmb_u32 rung)
{
	tmb_u64 clock = tfs_os_clock(), waited, nap;
	tmb_u32 none = 0;

	if (seen != w->seen) {
		w->seen = seen;
		w->changed = clock;
		w->asked = false;
		w->tell = TELL_NS;
	}
	tfs_ask(fs, w, clock, owner);
	if (w->how == TFS_BRIEFLY && clock - w->changed > TFS_BRIEF_NS)
		return -EAGAIN;
	waited = clock - w->started;
	nap = TFS_MIN(waited / 4 + NAP_MIN_NS, NAP_MAX_NS);
	if (tfs_os_sleep(fs, bell ? bell : &none, bell ? rung : 0, nap, w->how == TFS_KILLABLE || w->how == TFS_BRIEFLY || waited > SURE_NS))
		return -EINTR;
	return tfs_fenced(fs) ? -ESHUTDOWN : 0;
}

/* --- taking ---------------------------------------------------------------------------------------------------------------- */

/* Returns the next living member that waits, after the one of the last turn; TFS_MEMBERS: none. */
static tmb_u32 tfs_choose(struct tfs *fs, struct tmb_lock *lock, tmb_u64 word)
{
	tmb_u64 waiters = tmb_load_acquire(&lock->waiters);
	tmb_u32 after = (tmb_u32)tfs_field(word, TFS_LOCK_TURN) % TFS_MEMBERS; /* the member's number + 1, so the one after it */

	for (tmb_u32 i = 0; waiters && i < TFS_MEMBERS; i++) {
		tmb_u32 m = (after + i) % TFS_MEMBERS;

		if (!(waiters >> m & 1))
			continue;
		if (tfs_member_active(fs, m))
			return m;
		tmb_fetch_and(&lock->waiters, ~(1ULL << m));
	}
	return TFS_MEMBERS;
}

/* Takes an offered lock if the offer is to this member, or has ended. 'since': when the word was first seen; 0: just now. */
static int tfs_take_offered(struct tfs *fs, struct tmb_lock *lock, tmb_u64 now, tmb_u64 since)
{
	tmb_u32 owner = tmb_lock_owner(now);

	if (!tfs_is_own(fs, now)) {
		bool lapsed = since && tfs_os_clock() - since > OFFER_NS;

		if (tfs_member_alive(fs, owner, tfs_epoch_of(now)) && !lapsed)
			return 0;
		tmb_fetch_and(&lock->waiters, ~(1ULL << owner)); /* SkipIdler: it announces itself again when it runs */
	}
	return tmb_cas64(&lock->word, now, tfs_lock_owned(fs, now)); /* TakeLapsed */
}

/* Takes a lock over whose owner is dead, once the owner's transactions are recovered. */
static int tfs_take_dead(struct tfs *fs, struct tmb_lock *lock, struct tfs_wait *w, tmb_u64 now)
{
	tmb_u32 owner = tmb_lock_owner(now);

	if (tfs_member_alive(fs, owner, tfs_epoch_of(now)))
		return 0;
	if (w->how != TFS_NO_RECOVERY && fs->members && tmb_load_acquire(&fs->members[owner].recovered_epoch) < tfs_epoch_of(now)) {
		int err = tfs_recover_locks(fs, owner, w->how);

		if (err)
			return err;
	}
	return tmb_cas64(&lock->word, now, tfs_lock_owned(fs, now)); /* TakeDead */
}

/* One attempt by the first of a queue. 1: it owns the lock; 0: not yet; or an error. */
static int tfs_attempt(struct tfs *fs, struct tmb_lock *lock, struct tfs_wait *w, tmb_u64 now, tmb_u64 since)
{
	tmb_u64 kind = now & TFS_LOCK_KIND;

	if (!(now & 0xff)) /* free */
		return tmb_cas64(&lock->word, now, tfs_lock_owned(fs, now));
	if (tmb_lock_owner(now) >= TFS_MEMBERS || (kind != TFS_LOCK_HELD && kind != TFS_LOCK_OFFERED)) {
		tfs_damage(fs, "lock word without an owner", now, (tmb_u64)((tmb_u8 *)lock - fs->area));
		tmb_cas64(&lock->word, now, 0);
		return 0;
	}
	return kind == TFS_LOCK_OFFERED ? tfs_take_offered(fs, lock, now, since) : tfs_take_dead(fs, lock, w, now);
}

bool tfs_lock_at_once(struct tfs *fs, struct tmb_lock *lock, tmb_u32 *owner)
{
	struct tfs_wait w = {.how = TFS_NO_RECOVERY};
	tmb_u64 now = tmb_load_acquire(&lock->word);

	*owner = tmb_lock_owner(now);
	return tfs_attempt(fs, lock, &w, now, 0) > 0;
}

/* Announces this member as a waiter of the lock in state 'now'. False: the word has changed. */
static bool tfs_announce(struct tfs *fs, struct tmb_lock *lock, tmb_u64 now)
{
	if (tmb_load(&lock->word) != now)
		return false;
	tmb_fetch_or(&lock->waiters, 1ULL << fs->member); /* Announce */
	return tmb_load(&lock->word) == now; /* Confirm */
}

/* Demands the lock in state *now of its owner, and waits a moment for the offer. False: the word has changed. */
static bool tfs_demand(struct tmb_lock *lock, tmb_u64 *now)
{
	if ((*now & TFS_LOCK_KIND) != TFS_LOCK_HELD || *now & TFS_LOCK_DEMAND)
		return true;
	if (!tmb_cas64(&lock->word, *now, *now | TFS_LOCK_DEMAND))
		return false;
	*now |= TFS_LOCK_DEMAND;
	for (tmb_u32 i = 0; i < SPINS && tmb_load(&lock->word) == *now; i++)
		tfs_os_relax(); /* most owners soon offer it */
	return tmb_load(&lock->word) == *now;
}

/* Leaves the queue, if 'place' is one. The member stays announced while it has other threads in the queue; the next unlock wakes the first of them. */
static void tfs_withdraw(struct tfs *fs, struct tmb_lock *lock, struct tfs_waiter *place)
{
	tmb_u64 bit = 1ULL << fs->member;

	if (place)
		tfs_dequeue(place);
	if (tfs_first_of(fs, tfs_id_of(lock))) {
		tmb_fetch_or(&lock->waiters, bit);
		return;
	}
	if (!(tmb_load(&lock->waiters) & bit))
		return;
	tmb_fetch_and(&lock->waiters, ~bit);
	if (tfs_first_of(fs, tfs_id_of(lock))) /* Again: it may have announced itself in between */
		tmb_fetch_or(&lock->waiters, bit);
}

static bool tfs_is_gone(struct tfs_inode *inode, struct tfs_handle h)
{
	return inode && !tfs_is(inode, h);
}

/*
 * Waits until this thread owns the lock (1), or the wait has ended otherwise (an error). Only the first of the queue acts, and threads that find all
 * places taken: what the others wait for may not come before such a thread has its lock. *placep: its place, NULL: none.
 */
static int tfs_wait_in_queue(struct tfs *fs, struct tmb_lock *lock, struct tfs_wait *w, struct tfs_waiter **placep)
{
	tmb_u64 seen = 0, since = 0;
	bool slept = false;
	int got;

	for (;;) {
		struct tfs_waiter *place = *placep ? *placep : (*placep = tfs_enqueue(fs, lock));
		tmb_u32 rung = place ? tmb_load_acquire(&place->bell) : 0, owner = TFS_MEMBERS;
		tmb_u64 now = tmb_load_acquire(&lock->word);

		if (!place || tfs_first_of(fs, tfs_id_of(lock)) == place) {
			if (now != seen || !since) {
				seen = now;
				since = tfs_os_clock();
			}
			got = tfs_is_gone(w->inode, w->h) ? -ESTALE : tfs_attempt(fs, lock, w, now, since);
			if (got)
				return got;
			if (!tfs_announce(fs, lock, now) || (slept && !tfs_demand(lock, &now)))
				continue;
			owner = tmb_lock_owner(now);
		}
		slept = true;
		got = tfs_wait_more(fs, w, now & ~TFS_LOCK_DEMAND, owner, place ? &place->bell : NULL, rung);
		if (got)
			return got;
	}
}

/* Spins for a lock that is about to be released. False: it stays taken, or another thread demands it. */
static bool tfs_spin(struct tfs *fs, struct tmb_lock *lock, struct tfs_inode *inode, struct tfs_handle h)
{
	for (tmb_u32 i = 0; i < SPINS; i++) {
		tmb_u64 now = tmb_load_acquire(&lock->word);

		/* After the word: if that has become another inode's since, it has changed. */
		if (tfs_is_gone(inode, h))
			return false;
		if (!(now & 0xff) && tmb_cas64(&lock->word, now, tfs_lock_owned(fs, now)))
			return true;
		if (now & TFS_LOCK_DEMAND)
			return false;
		tfs_os_relax();
	}
	return false;
}

/* For a lock that was not free at once. */
static TFS_SELDOM int tfs_wait_for(struct tfs *fs, struct tmb_lock *lock, enum tfs_how how, struct tfs_inode *inode, struct tfs_handle h)
{
	struct tfs_waiter *place = NULL;
	struct tfs_wait w;
	int err;

	if (tfs_spin(fs, lock, inode, h))
		return 0;
	tfs_wait_start(&w, how);
	w.inode = inode;
	w.h = h;
	err = tfs_wait_in_queue(fs, lock, &w, &place);
	if (err < 0 && tfs_is_gone(inode, h)) { /* there is no lock any more */
		if (place)
			tfs_dequeue(place);
		return err;
	}
	tfs_withdraw(fs, lock, place);
	if (err > 0)
		return 0;
	/* An offer to this member goes to the next of its queue, or to another member. */
	if (err != -ESHUTDOWN && tmb_load(&lock->waiters))
		tfs_ring(fs, lock, fs->member);
	return err;
}

static inline int tfs_may_lock(struct tfs *fs)
{
	return fs->read_only ? -EROFS : tfs_fenced(fs) ? -ESHUTDOWN : 0;
}

int tfs_lock_of(struct tfs *fs, struct tmb_lock *lock, enum tfs_how how, struct tfs_inode *inode, struct tfs_handle h)
{
	int err = tfs_may_lock(fs);

	return err ? err : tfs_wait_for(fs, lock, how, inode, h);
}

int tfs_lock(struct tfs *fs, struct tmb_lock *lock, enum tfs_how how)
{
	int err = tfs_may_lock(fs);

	if (err || tfs_try_lock(fs, lock))
		return err;
	return tfs_wait_for(fs, lock, how, NULL, (struct tfs_handle){0});
}

/* Returns the word that offers the lock in state 'now' to a member. */
static tmb_u64 tfs_offered(struct tfs *fs, tmb_u64 now, tmb_u32 to)
{
	tmb_u32 epoch = to == fs->member || !fs->members ? fs->epoch : tmb_epoch(tmb_load(&fs->members[to].state_epoch));

	return tfs_with(now & (TFS_LOCK_TURN | TFS_LOCK_COUNT), TFS_LOCK_TURN, to + 1) | tmb_lock_word(to, epoch, 0) | TFS_LOCK_OFFERED;
}

/* Wakes the next member, which may find that another one has taken the lock. */
static TFS_SELDOM void tfs_wake_next(struct tfs *fs, struct tmb_lock *lock, tmb_u64 word)
{
	tmb_u32 heir = tfs_choose(fs, lock, word);

	if (heir < TFS_MEMBERS)
		tfs_ring(fs, lock, heir);
}

/* For a lock that a waiter demands. */
static TFS_SELDOM void tfs_hand_over(struct tfs *fs, struct tmb_lock *lock)
{
	for (;;) {
		tmb_u64 now = tmb_load(&lock->word), next = now & (TFS_LOCK_TURN | TFS_LOCK_COUNT);
		tmb_u32 heir = now & TFS_LOCK_DEMAND ? tfs_choose(fs, lock, now) : TFS_MEMBERS;

		/* If this member was declared dead, the lock is no longer its own. */
		if (!tfs_is_own(fs, now) || (now & TFS_LOCK_KIND) != TFS_LOCK_HELD)
			return;
		if (heir < TFS_MEMBERS)
			next = tfs_offered(fs, now, heir);
		if (!tmb_cas64(&lock->word, now, next))
			continue;
		if (heir < TFS_MEMBERS)
			tfs_ring(fs, lock, heir);
		else if (tmb_load(&lock->waiters))
			tfs_wake_next(fs, lock, now);
		return;
	}
}

void tfs_unlock(struct tfs *fs, struct tmb_lock *lock)
{
	tmb_u64 now = tmb_load(&lock->word);

	if (now & TFS_LOCK_DEMAND || !tfs_is_own(fs, now) || (now & TFS_LOCK_KIND) != TFS_LOCK_HELD ||
	    !tmb_cas64(&lock->word, now, now & (TFS_LOCK_TURN | TFS_LOCK_COUNT)))
		tfs_hand_over(fs, lock);
	else if (tmb_load(&lock->waiters))
		tfs_wake_next(fs, lock, now);
}
