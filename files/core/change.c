// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Change events: a member writes what it changed to a ring that watching members read (tfs_format.h). Without a watcher
 * that costs one load.
 */
#include "tfs_internal.h"

static tmb_u64 tfs_others_watching(struct tfs *fs)
{
	return tmb_load(&tfs_sb(fs)->watchers) & ~(1ULL << fs->member);
}

bool tfs_change_wanted(struct tfs *fs)
{
	return fs->members && !fs->read_only && !tfs_fenced(fs) && tfs_others_watching(fs);
}

bool tfs_change_unheard(struct tfs *fs, tmb_u64 end)
{
	tmb_u64 head = tmb_load(&tfs_member_area(fs, fs->member)->change_head);

	/* Orders the caller's change before the load that looks for a new watcher. */
	tmb_fence();
	if (!end || end > head || head - end > TFS_CHANGE_RING / 2)
		return false;
	for (tmb_u64 left = tfs_others_watching(fs); left; left &= left - 1) {
		tmb_u32 m = (tmb_u32)__builtin_ctzll(left);

		if (tmb_load(&tfs_member_area(fs, m)->heard[fs->member]) >= end)
			return false;
	}
	return true;
}

tmb_u64 tfs_change_post(struct tfs *fs, const struct tfs_change *c)
{
	struct tfs_member_area *area = tfs_member_area(fs, fs->member);
	tmb_u64 head = tmb_load(&area->change_head) & ~(tmb_u64)(TFS_CHANGE_UNIT - 1);
	tmb_u32 at = head % TFS_CHANGE_RING, name_len = c->dir ? TFS_MIN(c->name_len, (tmb_u32)TFS_NAME_MAX) : 0;
	tmb_u32 length = ((tmb_u32)sizeof(struct tfs_change_record) + name_len + TFS_CHANGE_UNIT - 1) & ~(TFS_CHANGE_UNIT - 1);
	struct tfs_change_record *r = (struct tfs_change_record *)(area->changes + at);

	if (at + length > TFS_CHANGE_RING) {
		tmb_store(&r->ino, 0);
		tmb_store(&r->length, (tmb_u16)(TFS_CHANGE_RING - at));
		head += TFS_CHANGE_RING - at;
		r = (struct tfs_change_record *)area->changes;
	}
	tmb_store(&r->ino, c->ino);
	tmb_store(&r->dir, c->dir);
	tmb_store(&r->mask, c->mask);
	tmb_store(&r->cookie, c->cookie);
	tmb_store(&r->length, (tmb_u16)length);
	tmb_store(&r->name_len, (tmb_u8)name_len);
	memcpy(r + 1, c->name, name_len);
	head += length;
	tmb_store_release(&area->change_head, head);
	for (tmb_u64 left = tfs_others_watching(fs); left; left &= left - 1) {
		tmb_u32 m = (tmb_u32)__builtin_ctzll(left);

		/* One doorbell for all records that the watcher has not looked at yet. */
		if (!(tmb_fetch_or(&fs->members[m].pending, TMB_PENDING_EVENT) & TMB_PENDING_EVENT))
			tfs_os_ring(fs, m);
	}
	return head;
}

int tfs_listen_begin(struct tfs *fs, struct tfs_listener *l)
{
	struct tfs_member_area *own = tfs_member_area(fs, fs->member);

	if (!fs->members)
		return -EINVAL;
	if (fs->read_only)
		return -EROFS;
	for (tmb_u32 m = 0; m < TFS_MEMBERS; m++) {
		l->at[m] = tmb_load_acquire(&tfs_member_area(fs, m)->change_head) & ~(tmb_u64)(TFS_CHANGE_UNIT - 1);
		tmb_store(&own->heard[m], l->at[m]);
	}
	l->from = 0;
	tmb_fetch_or(&tfs_sb(fs)->watchers, 1ULL << fs->member);
	return 0;
}

void tfs_listen_end(struct tfs *fs)
{
	if (!fs->read_only && !tfs_fenced(fs))
		tmb_fetch_and(&tfs_sb(fs)->watchers, ~(1ULL << fs->member));
}

/* Copies the next record of member m's ring to *c. Returns 1; 0: none; -EOVERFLOW: some were lost. */
static int tfs_next_of(struct tfs *fs, struct tfs_listener *l, tmb_u32 m, struct tfs_change *c)
{
	struct tfs_member_area *area = tfs_member_area(fs, m);
	tmb_u64 head = tmb_load_acquire(&area->change_head) & ~(tmb_u64)(TFS_CHANGE_UNIT - 1);

	/* Bounded: a ring holds no more records than this, and each turn passes one. */
	for (tmb_u32 i = 0; i <= TFS_CHANGE_RING / TFS_CHANGE_UNIT && l->at[m] != head; i++) {
		tmb_u32 at = l->at[m] % TFS_CHANGE_RING, length;
		struct tfs_change_record *r = (struct tfs_change_record *)(area->changes + at);

		if (head - l->at[m] > TFS_CHANGE_RING)
			break;
		length = tmb_load(&r->length);
		c->ino = tmb_load(&r->ino);
		c->dir = tmb_load(&r->dir);
		c->mask = tmb_load(&r->mask);
		c->cookie = tmb_load(&r->cookie);
		c->name_len = tmb_load(&r->name_len);
		if (!length || length % TFS_CHANGE_UNIT || at + length > TFS_CHANGE_RING || length > head - l->at[m] ||
		    (c->ino && sizeof(*r) + c->name_len > length))
			break;
		memcpy(c->name, r + 1, c->ino ? c->name_len : 0);
		c->name[c->ino ? c->name_len : 0] = 0;
		c->member = m;
		/* The writer may be one record further than the head says, and have skipped the ring's end for it. */
		tmb_fence();
		if (tmb_load(&area->change_head) + 2 * TFS_CHANGE_MAX - l->at[m] > TFS_CHANGE_RING)
			break;
		l->at[m] += length;
		/* Stored before the caller acts on the record: writers repeat what changes from now on. */
		tmb_store(&tfs_member_area(fs, fs->member)->heard[m], l->at[m]);
		tmb_fence();
		if (c->ino)
			return 1;
	}
	if (l->at[m] == head)
		return 0;
	l->at[m] = head;
	tmb_store(&tfs_member_area(fs, fs->member)->heard[m], l->at[m]);
	return -EOVERFLOW;
}

int tfs_listen_next(struct tfs *fs, struct tfs_listener *l, struct tfs_change *c)
{
	for (tmb_u32 i = 0; i < TFS_MEMBERS; i++) {
		tmb_u32 m = l->from % TFS_MEMBERS;
		int ret = m == fs->member ? 0 : tfs_next_of(fs, l, m, c);

		l->from = m + 1;
		if (ret)
			return ret;
	}
	return 0;
}
