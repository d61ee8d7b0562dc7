// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Who lives, who is rung, and the locks of inodes (wait.c has the lock itself). Pins and mappings keep blocks from being reused: see
 * tfs_wait_unused.
 */
#include "tfs_internal.h"

#define SPINS 200u

bool tfs_member_alive(struct tfs *fs, tmb_u32 member, tmb_u32 epoch)
{
	if (member == fs->member)
		return epoch == fs->epoch;
	if (member >= TFS_MEMBERS || !fs->members)
		return false;
	return tmb_load_acquire(&fs->members[member].state_epoch) == tmb_state_epoch(TMB_MEMBER_ACTIVE, epoch);
}

bool tfs_member_active(struct tfs *fs, tmb_u32 member)
{
	if (member == fs->member)
		return true;
	return fs->members && tmb_state(tmb_load_acquire(&fs->members[member].state_epoch)) == TMB_MEMBER_ACTIVE;
}

bool tfs_fenced(struct tfs *fs)
{
	return fs->members && tmb_load(&fs->members[fs->member].state_epoch) != tmb_state_epoch(TMB_MEMBER_ACTIVE, fs->epoch);
}

int tfs_try_lock_inode(struct tfs *fs, struct tfs_handle h)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);

	if (!inode)
		return -ESTALE;
	if (fs->read_only)
		return -EROFS;
	if (tfs_fenced(fs))
		return -ESHUTDOWN;
	if (!tfs_try_lock(fs, &inode->lock))
		return -EAGAIN;
	if (tfs_is(inode, h))
		return 0;
	tfs_unlock(fs, &inode->lock);
	return -ESTALE;
}

static void ring(struct tfs *fs, tmb_u32 member, tmb_u64 reason)
{
	if (!fs->members)
		return;
	tmb_fetch_or(&fs->members[member].pending, reason);
	tfs_os_ring(fs, member);
}

void tfs_ring_members(struct tfs *fs, tmb_u64 members, tmb_u64 reason)
{
	for (; members; members &= members - 1)
		ring(fs, (tmb_u32)__builtin_ctzll(members), reason);
}

int tfs_lock_inode(struct tfs *fs, struct tfs_handle h)
{
	return tfs_lock_inode_as(fs, h, TFS_KILLABLE);
}

int tfs_lock_inode_as(struct tfs *fs, struct tfs_handle h, enum tfs_how how)
{
	struct tfs_inode *inode = tfs_inode(fs, h.ino);
	int err;

	if (!inode)
		return -ESTALE;
	err = tfs_lock(fs, &inode->lock, how);
	if (err)
		return err;
	if (tfs_is(inode, h))
		return 0;
	tfs_unlock(fs, &inode->lock);
	return -ESTALE;
}

void tfs_unlock_inode(struct tfs *fs, tmb_u64 ino)
{
	struct tfs_inode *inode = tfs_inode(fs, ino);

	if (inode)
		tfs_unlock(fs, &inode->lock);
}

/* --- pins ---------------------------------------------------------------------------------------------------- */

tmb_u32 tfs_pin(struct tfs *fs, tmb_u64 ino)
{
	struct tfs_member_area *area = tfs_member_area(fs, fs->member);
	tmb_u32 i = tfs_os_cpu() % TFS_PINS;

	/* Own slots only; another thread on the same slot is rare, and leaves soon. */
	if (fs->read_only)
		return TFS_PINS;
	for (tmb_u32 round = 0;; round++, i = (i + 1) % TFS_PINS) {
		tmb_u64 bound = tmb_load(&area->pins_in_use);

		while (bound <= i)
			if (tmb_cas64(&area->pins_in_use, bound, i + 1))
				break;
			else
				bound = tmb_load(&area->pins_in_use);
		if (tmb_cas64(&area->pins[i].ino, 0, ino)) /* also the fence between the pin and the walk */
			return i;
		if (round >= 4 * TFS_PINS) {
			tfs_os_wait(fs, 0);
			if (round > 1000 * TFS_PINS) {
				tfs_damage(fs, "read pins all taken", ino, i);
				return TFS_PINS;
			}
		}
	}
}

void tfs_unpin(struct tfs *fs, tmb_u32 pin)
{
	if (pin < TFS_PINS)
		tmb_store_release(&tfs_member_area(fs, fs->member)->pins[pin].ino, 0);
}

/* Bit per member that reads the inode. */
static tmb_u64 pinned(struct tfs *fs, tmb_u64 ino)
{
	tmb_u64 members = 0;

	for (tmb_u32 m = 0; m < TFS_MEMBERS; m++) {
		struct tfs_member_area *area;
		tmb_u64 n;

		if (!tfs_member_active(fs, m))
			continue;
		area = tfs_member_area(fs, m);
		n = TFS_MIN(tmb_load(&area->pins_in_use), TFS_PINS);
		for (tmb_u64 i = 0; i < n; i++)
			if (tmb_load_acquire(&area->pins[i].ino) == ino)
				members |= 1ULL << m;
	}
	return members;
}

/* One round of waiting for readers and mappers: spins first, then sleeps; false: the time is up. */
static bool wait_round(struct tfs *fs, tmb_u32 round, tmb_u64 *since)
{
	if (round < SPINS) {
		tfs_os_relax();
		return true;
	}
	if (!*since)
		*since = tfs_os_clock();
	else if (tfs_os_clock() - *since > TFS_REVOKE_LIMIT_NS)
		return false;
	tfs_os_wait(fs, round - SPINS);
	return true;
}

tmb_u64 tfs_wait_unpinned(struct tfs *fs, tmb_u64 ino)
{
	tmb_u64 since = 0, members;

	tmb_fence();
	for (tmb_u32 round = 0; (members = pinned(fs, ino)); round++)
		if (!wait_round(fs, round, &since))
			break;
	return members;
}

tmb_u64 tfs_active_members(struct tfs *fs, tmb_u64 members)
{
	for (tmb_u64 left = members; left; left &= left - 1)
		if (!tfs_member_active(fs, (tmb_u32)__builtin_ctzll(left)))
			members &= ~(left & -left);
	return members;
}

/* It maps the inode no more, or only what it looked up after the unlinking. */
static bool let_go(struct tfs *fs, struct tfs_inode *inode, tmb_u32 member, tmb_u32 begun)
{
	tmb_u32 done = (tmb_u32)tmb_load_acquire(&tfs_member_area(fs, member)->revokes_done);

	return !(tmb_load_acquire(&inode->mappers) & 1ULL << member) || !tfs_member_active(fs, member) || done - begun - 1 < 1u << 31;
}

/* Of the members those that let a wait run out and have not looked since: they are asked again, but nobody waits for them again. */
static tmb_u64 still_silent(struct tfs *fs, tmb_u64 members)
{
	tmb_u64 silent = 0;

	for (members &= tmb_load(&fs->silent); members; members &= members - 1) {
		tmb_u32 m = (tmb_u32)__builtin_ctzll(members);

		if (tmb_load(&fs->members[m].pending) & TMB_PENDING_REVOKE &&
		    (tmb_u32)tmb_load(&tfs_member_area(fs, m)->revokes_begun) == tmb_load(&fs->silent_at[m]))
			silent |= 1ULL << m;
		else
			tmb_fetch_and(&fs->silent, ~(1ULL << m));
	}
	return silent;
}

static void note_silent(struct tfs *fs, tmb_u64 members, const tmb_u32 *begun)
{
	for (; members; members &= members - 1) {
		tmb_u32 m = (tmb_u32)__builtin_ctzll(members);

		tmb_store(&fs->silent_at[m], begun[m]);
		tmb_fetch_or(&fs->silent, 1ULL << m);
	}
}

tmb_u64 tfs_wait_unused(struct tfs *fs, struct tfs_inode *inode, tmb_u64 ino)
{
	tmb_u32 begun[TFS_MEMBERS];
	tmb_u64 since = 0, left, silent;

	tmb_fetch_add(&inode->map_seq, 1); /* also the fence between the unlinking and the looking */
	left = tfs_active_members(fs, tmb_load_acquire(&inode->mappers) & ~(1ULL << fs->member));
	/* A round of taking back that begins after this one comes after the unlinking. */
	for (tmb_u32 m = 0; m < TFS_MEMBERS; m++)
		begun[m] = left & 1ULL << m ? (tmb_u32)tmb_load(&tfs_member_area(fs, m)->revokes_begun) : 0;
	silent = still_silent(fs, left);
	tfs_ring_members(fs, left, TMB_PENDING_REVOKE);
	left &= ~silent;
	for (tmb_u32 round = 0;; round++) {
		for (tmb_u32 m = 0; m < TFS_MEMBERS; m++)
			if (left & 1ULL << m && let_go(fs, inode, m, begun[m]))
				left &= ~(1ULL << m);
		if (!left)
			return silent | tfs_wait_unpinned(fs, ino);
		if (!wait_round(fs, round, &since)) {
			note_silent(fs, left, begun);
			return left | silent | pinned(fs, ino);
		}
	}
}

tmb_u64 tfs_holders(struct tfs *fs, struct tfs_inode *inode, tmb_u64 ino)
{
	tmb_u64 mappers;

	tmb_fetch_add(&inode->map_seq, 1); /* read-only members are no mappers, and look here */
	mappers = tfs_active_members(fs, tmb_load_acquire(&inode->mappers));
	return mappers | tfs_wait_unpinned(fs, ino);
}
