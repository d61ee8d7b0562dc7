// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * When the blocks that were unlinked from an inode may be used again: once no member can look at them any more.
 *
 * Two kinds of members may still look at a block that nothing refers to:
 * - Readers, which copy without a lock. A reader pins the inode (tfs_pin) before it looks the block up. A member that may not write can't store a pin:
 * it compares the inode's stamp (tfs_stamp_of) before and after its copy. So does a reader that found no free pin.
 * - Mappers: members with their bit in the inode's 'mappers'. A removal asks them to revoke their mappings (TMB_PENDING_REVOKE).
 * Either may be suspended. So a removal waits READERS_NS for readers and TFS_REVOKE_LIMIT_NS for mappers. A member that exceeds the limit is not waited
 * for again until it has checked its readers and mappings.
 *
 * Freeing a block that some members may still look at is deferred: its map byte becomes TFS_MAP_DEFERRED, and the super block has a bit for each of those
 * members, its holders. A member's bit is cleared when it has revoked all its stale mappings and its readers have finished, when it leaves, or when it
 * dies. When no bit of a living member is left, all deferred blocks become free.
 *
 * Only the members that clear bits and free blocks take a lock (deferred_lock). One that defers blocks takes none, since the lock's owner may be
 * suspended. It sets its holders' TMB_PENDING_REVOKE, then their bits, then the map bytes, then bits and TMB_PENDING_REVOKE again:
 * - Whoever finds a deferred byte and then looks at the bits sees those of its holders, and does not free it.
 * - A holder that clears its bit, and was asked meanwhile, sees its TMB_PENDING_REVOKE afterwards, and sets the bit again.
 * - A holder that let go too early to find the byte lets go once more.
 * A member that finds the lock taken by a living one leaves its work to that: it sets the owner's bit and TMB_PENDING_REVOKE.
 *
 * Members die in between: the lock's owner, after it has cleared the last bit and before it has set its own again, which leaves deferred blocks without a
 * holder; or a member that defers, after it has set bits and before it has rung. A removal may store the bit of a member that has just left, which then
 * would count for the slot's next member. So recoveries and openings look at all deferred blocks (tfs_deferred_settle).
 */
#include "tfs_internal.h"

#define SPINS 200u
#define READERS_NS (20ULL * 1000 * 1000) /* a running reader finishes in a fraction of it */
#define READER_ROUNDS 64u /* some 20 ms */
#define KEEPING_NS (200ULL * 1000 * 1000) /* for a member that can't revoke all: its worker looks every 50 ms, then gives way for as long */

/* --- pins ------------------------------------------------------------------------------------------ */

tmb_u32 tfs_pin(struct tfs *fs, tmb_u64 ino)
{
	struct tfs_member_area *area = tfs_member_area(fs, fs->member);
	tmb_u32 i = tfs_os_cpu() % TFS_PINS;

	if (fs->read_only)
		return TFS_PINS;
	for (tmb_u32 round = 0; round < 2 * TFS_PINS; round++, i = (i + 1) % TFS_PINS) {
		tmb_u64 bound = tmb_load(&area->pins_in_use);

		while (bound <= i)
			if (tmb_cas64(&area->pins_in_use, bound, i + 1))
				break;
			else
				bound = tmb_load(&area->pins_in_use);
		if (tmb_cas64(&area->pins[i].ino, 0, ino)) /* also the fence between the pin and the walk */
			return i;
	}
	return TFS_PINS; /* all pins are taken, or the memory is damaged */
}

void tfs_unpin(struct tfs *fs, tmb_u32 pin)
{
	if (pin < TFS_PINS)
		tfs_end_pin(fs, pin);
}

/* Stores in 'slots' (bit per pin of each member) the pins of the inode. Returns a bit per member that has any. */
static tmb_u64 tfs_pinned(struct tfs *fs, tmb_u64 ino, tmb_u64 *slots)
{
	tmb_u64 members = 0;

	for (tmb_u32 m = 0; m < TFS_MEMBERS; m++) {
		struct tfs_member_area *area = tfs_member_area(fs, m);
		tmb_u64 used;

		if (slots[m] && !tfs_member_active(fs, m))
			slots[m] = 0;
		if (!slots[m])
			continue;
		used = tmb_load(&area->pins_in_use);
		if (used < TFS_PINS)
			slots[m] &= (1ULL << used) - 1;
		for (tmb_u64 left = slots[m]; left; left &= left - 1)
			if (tmb_load_acquire(&area->pins[__builtin_ctzll(left)].ino) != ino)
				slots[m] &= ~(left & -left);
		if (slots[m])
			members |= 1ULL << m;
	}
	return members;
}

/* --- members that do not answer ---------------------------------------------------------------------------------- */

static tmb_u32 tfs_rounds_begun(struct tfs *fs, tmb_u32 member)
{
	return (tmb_u32)tmb_load(&tfs_member_area(fs, member)->revokes_begun);
}

static tmb_u32 tfs_rounds_done(struct tfs *fs, tmb_u32 member)
{
	return (tmb_u32)tmb_load(&tfs_member_area(fs, member)->revokes_done);
}

static void tfs_note_slow(struct tfs_slow *slow, tmb_u32 member, tmb_u32 count)
{
	tmb_store(&slow->counts[member], count);
	tmb_fetch_or(&slow->members, 1ULL << member);
}

/* Returns those of 'members' that were noted and whose counts ('count') are what they were then. Forgets the others. */
static tmb_u64 tfs_still_slow(struct tfs *fs, struct tfs_slow *slow, tmb_u64 members, tmb_u32 (*count)(struct tfs *fs, tmb_u32 member))
{
	tmb_u64 still = 0;

	for (members &= tmb_load(&slow->members); members; members &= members - 1) {
		tmb_u32 m = (tmb_u32)__builtin_ctzll(members);

		if (count(fs, m) == tmb_load(&slow->counts[m]))
			still |= 1ULL << m;
		else
			tmb_fetch_and(&slow->members, ~(1ULL << m));
	}
	return still;
}

/* Returns those of 'members' that let a wait run out and have not revoked anything since. They are asked again but not waited for. */
static tmb_u64 tfs_still_silent(struct tfs *fs, tmb_u64 members)
{
	for (tmb_u64 left = members & tmb_load(&fs->silent.members); left; left &= left - 1)
		if (!fs->members || !(tmb_load(&fs->members[__builtin_ctzll(left)].pending) & TMB_PENDING_REVOKE))
			tmb_fetch_and(&fs->silent.members, ~(left & -left)); /* it took the bit, so it answers */
	return tfs_still_slow(fs, &fs->silent, members, tfs_rounds_begun);
}

static void tfs_note_silent(struct tfs *fs, tmb_u64 members, const tmb_u32 *begun)
{
	for (; members; members &= members - 1)
		tfs_note_slow(&fs->silent, (tmb_u32)__builtin_ctzll(members), begun[__builtin_ctzll(members)]);
}

/*
 * A member whose pages of one file are in use (a pipe, direct I/O) answers, but ends no round as long as they are. It still lets go of other files, and maps
 * some of them again at once. Returns those of 'members' that let a wait run out so and have ended no round since: they are waited for only KEEPING_NS.
 */
static tmb_u64 tfs_still_keeping(struct tfs *fs, tmb_u64 members)
{
	return tfs_still_slow(fs, &fs->keeping, members, tfs_rounds_done);
}

/* Notes those of 'members' that have begun a round since 'begun' and ended none. */
static void tfs_note_keeping(struct tfs *fs, tmb_u64 members, const tmb_u32 *begun)
{
	for (; members; members &= members - 1) {
		tmb_u32 m = (tmb_u32)__builtin_ctzll(members), done = tfs_rounds_done(fs, m);

		if (tfs_rounds_begun(fs, m) != begun[m])
			tfs_note_slow(&fs->keeping, m, done);
	}
}

/* Stores how often each of these members has begun to revoke mappings. A round that begins after this one begins after the unlinking. */
static void tfs_rounds_of(struct tfs *fs, tmb_u64 members, tmb_u32 *begun)
{
	for (tmb_u32 m = 0; m < TFS_MEMBERS; m++)
		begun[m] = members & 1ULL << m ? tfs_rounds_begun(fs, m) : 0;
}

/* One round of waiting: spins first, then sleeps. Returns false when the time is up. */
static bool tfs_wait_round(struct tfs *fs, tmb_u32 round, tmb_u64 *since, tmb_u64 limit)
{
	if (round < SPINS) {
		tfs_os_relax();
		return true;
	}
	if (!*since)
		*since = tfs_os_clock();
	else if (tfs_os_clock() - *since > limit)
		return false;
	tfs_os_wait(fs, round - SPINS);
	return true;
}

/* --- who may still look at what was unlinked ------------------------------------------------------------------------ */

tmb_u64 tfs_active_members(struct tfs *fs, tmb_u64 members)
{
	for (tmb_u64 left = members; left; left &= left - 1)
		if (!tfs_member_active(fs, (tmb_u32)__builtin_ctzll(left)))
			members &= ~(left & -left);
	return members;
}

/* Waits, at most READERS_NS, until the members that read the inode now have finished their copies. Returns those that have not. */
static tmb_u64 tfs_wait_readers(struct tfs *fs, tmb_u64 ino)
{
	tmb_u64 slots[TFS_MEMBERS], since = 0, members, silent;
	tmb_u32 begun[TFS_MEMBERS];

	memset(slots, 0xff, sizeof(slots));
	members = tfs_pinned(fs, ino, slots);
	silent = members ? tfs_still_silent(fs, members) : 0;
	for (tmb_u32 round = 0; members & ~silent; round++) {
		if (!tfs_wait_round(fs, round, &since, READERS_NS)) {
			tfs_rounds_of(fs, members, begun);
			tfs_note_silent(fs, members & ~(1ULL << fs->member), begun);
			break;
		}
		members = tfs_pinned(fs, ino, slots);
	}
	return members;
}

/* Returns whether the member no longer maps the inode, or only what it looked up after the unlinking. */
static bool tfs_let_go(struct tfs *fs, struct tfs_inode *inode, tmb_u32 member, tmb_u32 begun)
{
	tmb_u32 done = (tmb_u32)tmb_load_acquire(&tfs_member_area(fs, member)->revokes_done);

	return !(tmb_load_acquire(&inode->mappers) & 1ULL << member) || !tfs_member_active(fs, member) || done - begun - 1 < 1u << 31;
}

static void tfs_tell_silent(struct tfs *fs, tmb_u64 members, const tmb_u32 *begun)
{
	for (; members; members &= members - 1) {
		tmb_u32 m = (tmb_u32)__builtin_ctzll(members);
		/* One with pages in use sets the bit again itself. */
		bool answers = !(tmb_load(&fs->members[m].pending) & TMB_PENDING_REVOKE) ||
			       tfs_rounds_begun(fs, m) != begun[m];

		tfs_os_waiting(fs, m, answers, TFS_REVOKE_LIMIT_NS / 1000000000);
	}
}

/* Asks the members that map the inode to revoke their mappings, and waits at most TFS_REVOKE_LIMIT_NS. Returns those that did not. */
static tmb_u64 tfs_ask_mappers(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_u64 since = 0, left = tfs_active_members(fs, tmb_load_acquire(&inode->mappers) & ~(1ULL << fs->member)), given_up, keeping;
	tmb_u32 begun[TFS_MEMBERS];

	if (!left)
		return 0;
	tfs_rounds_of(fs, left, begun);
	given_up = tfs_still_silent(fs, left);
	keeping = tfs_still_keeping(fs, left);
	tfs_ring_members(fs, left, TMB_PENDING_REVOKE);
	left &= ~given_up;
	for (tmb_u32 round = 0; left; round++) {
		for (tmb_u64 ask = left; ask; ask &= ask - 1)
			if (tfs_let_go(fs, inode, (tmb_u32)__builtin_ctzll(ask), begun[__builtin_ctzll(ask)]))
				left &= ~(ask & -ask);
		if (left && !tfs_wait_round(fs, round, &since, left & ~keeping ? TFS_REVOKE_LIMIT_NS : KEEPING_NS)) {
			tfs_note_silent(fs, left & ~keeping, begun);
			tfs_note_keeping(fs, left & ~keeping, begun);
			tfs_tell_silent(fs, left & ~keeping, begun);
			given_up |= left;
			break;
		}
	}
	return given_up;
}

tmb_u64 tfs_wait_mappers(struct tfs *fs, struct tfs_inode *inode)
{
	tmb_fetch_add(&inode->map_seq, 1);
	return tfs_ask_mappers(fs, inode);
}

tmb_u64 tfs_holders(struct tfs *fs, struct tfs_inode *inode, tmb_u64 ino, bool wait)
{
	tmb_u64 mappers;

	tmb_fetch_add(&inode->map_seq, 1); /* also the fence between the unlinking and the loads of pins and mappers */
	mappers = wait ? tfs_ask_mappers(fs, inode) : tfs_active_members(fs, tmb_load_acquire(&inode->mappers));
	return mappers | tfs_wait_readers(fs, ino);
}

tmb_u64 tfs_reading(struct tfs *fs, struct tfs_inode *inode, tmb_u64 ino)
{
	tmb_fetch_add(&inode->map_seq, 1);
	return tfs_wait_readers(fs, ino);
}

/* --- deferred frees ----------------------------------------------------------------------------------------------------------- */

/*
 * Takes the lock of the deferred blocks unless a living member keeps it, which may be suspended. *owner: that member. A dead owner's lock is taken over
 * without that owner's recovery, since the caller may hold an inode's lock.
 */
static bool tfs_lock_soon(struct tfs *fs, tmb_u32 *owner)
{
	for (tmb_u32 round = 0; round < SPINS; round++) {
		if (tfs_lock_at_once(fs, &tfs_sb(fs)->deferred_lock, owner))
			return true;
		tfs_os_relax();
	}
	return false;
}

static void tfs_end_deferral(struct tfs *fs)
{
	tfs_unlock(fs, &tfs_sb(fs)->deferred_lock);
}

static void tfs_set_holders(struct tfs *fs, tmb_u64 holders)
{
	tmb_u64 *word = &tfs_sb(fs)->deferred_members;

	tmb_fetch_or(word, holders);
	tfs_persist(fs, word, sizeof(*word));
	tfs_barrier(fs);
}

tmb_u8 tfs_free_begin(struct tfs *fs, tmb_u64 holders)
{
	if (!holders)
		return TFS_MAP_FREE;
	if (tfs_fenced(fs)) /* other members clean up after this one */
		return tfs_tag(fs);
	for (tmb_u64 left = holders; fs->members && left; left &= left - 1)
		tmb_fetch_or(&fs->members[__builtin_ctzll(left)].pending, TMB_PENDING_REVOKE);
	tfs_set_holders(fs, holders);
	return TFS_MAP_DEFERRED;
}

void tfs_free_end(struct tfs *fs, tmb_u8 mark, tmb_u64 holders)
{
	if (mark != TFS_MAP_DEFERRED)
		return;
	tfs_set_holders(fs, holders);
	tfs_ring_members(fs, holders, TMB_PENDING_REVOKE);
	tfs_deferred_release(fs, 0); /* if all of them have died meanwhile */
}

void tfs_free_tagged(struct tfs *fs, tmb_u8 tag, tmb_u64 holders)
{
	tmb_u64 block = fs->data_start;
	tmb_u8 mark = tfs_free_begin(fs, holders);

	if (mark != TFS_MAP_FREE && mark != TFS_MAP_DEFERRED)
		return;
	while ((block = tfs_find_map(fs, block, fs->blocks, tag)) < fs->blocks)
		tfs_set_map(fs, block, 1, mark);
	tfs_free_end(fs, mark, holders);
}

/* Returns whether this member was asked to let go since its last round began. Another thread moves the bit from 'pending' over 'taking' to 'asked': the
 * loads are in this order, so they miss it nowhere. */
static bool tfs_is_asked(struct tfs *fs)
{
	return (fs->members && tmb_load_acquire(&fs->members[fs->member].pending) & TMB_PENDING_REVOKE) || tmb_load_acquire(&fs->taking) ||
	       tmb_load(&fs->asked);
}

void tfs_take_begin(struct tfs *fs)
{
	tmb_fetch_add(&fs->taking, 1u);
}

void tfs_take_end(struct tfs *fs, tmb_u64 taken)
{
	if (taken & TMB_PENDING_REVOKE)
		tmb_store(&fs->asked, true);
	tmb_fetch_add(&fs->taking, -1u);
}

/*
 * Clears the bits of members that have let go, left or died, and frees the deferred blocks if no living member's bit is left. own: one of them is this
 * member, whose bit stays if it was asked once more. The caller holds the lock of the deferred blocks.
 */
static void tfs_release(struct tfs *fs, tmb_u64 members, bool own)
{
	tmb_u64 *holders = &tfs_sb(fs)->deferred_members, block = fs->data_start;

	while ((block = tfs_find_map(fs, block, fs->blocks, TFS_MAP_DEFERRED)) < fs->blocks) {
		__atomic_thread_fence(__ATOMIC_ACQUIRE); /* the bits after the byte */
		if (tfs_active_members(fs, tmb_load(holders) & ~members) || (own && tfs_is_asked(fs)))
			break;
		tfs_set_map(fs, block, 1, TFS_MAP_FREE);
	}
	tfs_barrier(fs);
	tmb_fetch_and(holders, ~members);
	if (own && tfs_is_asked(fs))
		tmb_fetch_or(holders, 1ULL << fs->member);
	tfs_persist(fs, holders, sizeof(*holders));
}

/* Frees what can be freed without these members' bits, or leaves that to a living member that frees blocks now. */
static void tfs_release_soon(struct tfs *fs, tmb_u64 members)
{
	tmb_u64 *word = &tfs_sb(fs)->deferred_members;
	tmb_u32 owner;

	if (tfs_lock_soon(fs, &owner)) {
		tfs_release(fs, members, false);
		tfs_end_deferral(fs);
	} else if (owner < TFS_MEMBERS) {
		tfs_ring_members(fs, 1ULL << owner, TMB_PENDING_REVOKE);
		tfs_set_holders(fs, 1ULL << owner);
		tfs_ring_members(fs, 1ULL << owner, TMB_PENDING_REVOKE);
		tmb_fetch_and(word, ~(members & ~(1ULL << owner)));
	}
}

void tfs_deferred_release(struct tfs *fs, tmb_u64 members)
{
	tmb_u64 holders = tmb_load(&tfs_sb(fs)->deferred_members);

	if (holders & members || (holders && !tfs_active_members(fs, holders)))
		tfs_release_soon(fs, members);
}

void tfs_deferred_settle(struct tfs *fs, tmb_u64 members)
{
	tmb_u64 *word = &tfs_sb(fs)->deferred_members;

	if (tmb_load(word) & members || tfs_find_map(fs, fs->data_start, fs->blocks, TFS_MAP_DEFERRED) < fs->blocks)
		tfs_release_soon(fs, members);
	tfs_ring_members(fs, tfs_active_members(fs, tmb_load(word) & ~members), TMB_PENDING_REVOKE);
}

bool tfs_await_deferred(struct tfs *fs)
{
	tmb_u64 *holders = &tfs_sb(fs)->deferred_members, since = 0, members = tfs_active_members(fs, tmb_load(holders)), silent;
	tmb_u32 begun[TFS_MEMBERS];

	if (!members)
		return false;
	silent = tfs_still_silent(fs, members);
	for (tmb_u32 round = 0; members && !(members & silent); round++) {
		if (!tfs_wait_round(fs, round, &since, READERS_NS)) {
			tfs_rounds_of(fs, members, begun);
			tfs_note_silent(fs, members & ~(1ULL << fs->member), begun);
			break;
		}
		members = tfs_active_members(fs, tmb_load_acquire(holders));
	}
	return !members;
}

/* --- the member that is asked to let go --------------------------------------------------------------------------------- */

void tfs_revoke(struct tfs *fs)
{
	struct tfs_member_area *area = tfs_member_area(fs, fs->member);

	if (fs->read_only || tfs_fenced(fs))
		return;
	tmb_store(&fs->asked, false);
	tmb_store(&area->revokes_begun, tmb_load(&area->revokes_begun) + 1);
	tmb_fence(); /* a member that saw the old number has unlinked before the mappings are looked at */
}

/* Waits a little for this member's readers that hold a pin now. A later reader can't find a block that was unlinked before. */
static bool tfs_readers_left(struct tfs *fs)
{
	struct tfs_member_area *area = tfs_member_area(fs, fs->member);

	for (tmb_u32 i = 0; i < TFS_PINS; i++) {
		tmb_u64 ino = tmb_load_acquire(&area->pins[i].ino);

		for (tmb_u32 round = 0; ino && tmb_load_acquire(&area->pins[i].ino) == ino; round++) {
			if (round == READER_ROUNDS)
				return true;
			tfs_os_wait(fs, round);
		}
	}
	return false;
}

bool tfs_revoked(struct tfs *fs)
{
	struct tfs_member_area *area = tfs_member_area(fs, fs->member);
	tmb_u64 bit = 1ULL << fs->member;
	tmb_u32 owner;

	if (!fs->read_only && !tfs_fenced(fs))
		tmb_store_release(&area->revokes_done, tmb_load(&area->revokes_begun));
	if (!fs->members || fs->read_only || tfs_fenced(fs) || !(tmb_load(&tfs_sb(fs)->deferred_members) & bit))
		return false;
	if (tfs_readers_left(fs) || !tfs_lock_soon(fs, &owner)) {
		tmb_fetch_or(&fs->members[fs->member].pending, TMB_PENDING_REVOKE);
		return true;
	}
	tfs_release(fs, bit, true);
	tfs_end_deferral(fs);
	return tfs_is_asked(fs);
}
