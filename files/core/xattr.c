// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Extended attributes: all of an inode's attributes are one image, in a tree of its own. A change writes a new image and swaps the root word;
 * readers copy the image under a pin and parse their copy.
 */
#include "tfs_internal.h"

#define IMAGE_MAX (2 * TFS_XATTR_MAX)

static tmb_u32 tfs_entry_bytes(const struct tfs_xattr_entry *e)
{
	return (tmb_u32)((sizeof(*e) + e->name_len + e->value_len + 7) & ~7ULL);
}

/* Returns the entry at *at of a private, hostile copy, or NULL, and moves *at past it. */
static const struct tfs_xattr_entry *tfs_next_entry(const tmb_u8 *image, tmb_u32 bytes, tmb_u32 *at)
{
	const struct tfs_xattr_entry *e = (const struct tfs_xattr_entry *)(image + *at);

	if (*at + sizeof(*e) > bytes || e->name_len > TFS_NAME_MAX || !e->name_len || e->value_len > TFS_XATTR_MAX ||
	    tfs_entry_bytes(e) > bytes - *at)
		return NULL;
	*at += tfs_entry_bytes(e);
	return e;
}

int tfs_xattr_image_ok(const void *image, tmb_u64 len)
{
	const struct tfs_xattr_image *head = image;
	tmb_u32 at = sizeof(*head);

	if (len > IMAGE_MAX)
		return -ENOSPC;
	if (len < sizeof(*head) || head->bytes != len)
		return -EINVAL;
	while (at < head->bytes)
		if (!tfs_next_entry(image, head->bytes, &at))
			return -EINVAL;
	return 0;
}

/* Reads the length of the image: at least its header's. */
static int tfs_image_bytes(struct tfs *fs, tmb_u64 root, tmb_u32 *bytes)
{
	struct tfs_run run;
	int err = tfs_tree_look(fs, root, 0, 1, &run);

	*bytes = !err && run.block ? tmb_load((tmb_u32 *)tfs_block(fs, run.block)) : 0;
	return *bytes < sizeof(struct tfs_xattr_image) || *bytes > IMAGE_MAX ? -EUCLEAN : 0;
}

static int tfs_copy_image(struct tfs *fs, tmb_u64 root, tmb_u8 *image, tmb_u32 bytes)
{
	struct tfs_run run;

	for (tmb_u32 done = 0, n; done < bytes; done += n) {
		int err = tfs_tree_look(fs, root, done >> TFS_BLOCK_SHIFT, tfs_blocks_of(bytes - done), &run);

		if (err || !run.block)
			return -EUCLEAN;
		n = (tmb_u32)TFS_MIN((tmb_u64)(bytes - done), run.count << TFS_BLOCK_SHIFT);
		memcpy(image + done, tfs_block(fs, run.block), n);
	}
	return 0;
}

/* Makes a private copy of the image, at least of its header; the caller frees it. room: bytes wanted beyond it. -EAGAIN: it was replaced
 * meanwhile. */
static int tfs_read_image(struct tfs *fs, struct tfs_inode *inode, struct tfs_handle h, tmb_u32 room, tmb_u8 **out)
{
	struct tfs_look look = {.h = h, .inode = inode};
	struct tfs_xattr_image *head;
	tmb_u32 bytes = sizeof(*head);
	tmb_u64 root;
	int err;

	tfs_keep(fs, &look);
	root = tmb_load_acquire(&inode->xattr_root);
	err = root ? tfs_image_bytes(fs, root, &bytes) : 0;
	if (!tfs_kept(fs, &look))
		return -EAGAIN;
	if (err)
		return tfs_is(inode, h) ? tfs_damage(fs, "attribute image size", h.ino, bytes) : -ESTALE;
	/* No allocation under a pin: it may sleep. */
	head = tfs_os_alloc(bytes + room + 8);
	if (!head)
		return -ENOMEM;
	tfs_keep(fs, &look);
	if (tmb_load_acquire(&inode->xattr_root) != root)
		err = -EAGAIN;
	else if (root)
		err = tfs_copy_image(fs, root, (tmb_u8 *)head, bytes);
	else
		head->bytes = bytes;
	if (!tfs_kept(fs, &look))
		err = -EAGAIN;
	if (!err && (head->bytes != bytes || tfs_xattr_image_ok(head, bytes)))
		err = -EUCLEAN;
	/* A pin does not protect an inode that no member has open. */
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	if (!tfs_is(inode, h))
		err = -ESTALE;
	else if (err == -EUCLEAN)
		err = tfs_damage(fs, "attribute image malformed", h.ino, bytes);
	if (err)
		tfs_os_free(head);
	else
		*out = (tmb_u8 *)head;
	return err;
}

/* Repeats tfs_read_image() while another member replaces the image. */
static int tfs_get_image(struct tfs *fs, struct tfs_handle h, tmb_u32 room, tmb_u8 **image)
{
	struct tfs_inode *inode;
	int err = tfs_live_inode(fs, h, &inode);

	for (tmb_u32 tries = 0; !err && tries < 10000; tries++) {
		err = tfs_read_image(fs, inode, h, room, image);
		if (err != -EAGAIN)
			return err;
		err = 0;
		tfs_os_relax();
	}
	return err ? err : tfs_damage(fs, "attributes changing without end", h.ino, 0);
}

static const struct tfs_xattr_entry *tfs_find(const tmb_u8 *image, const char *name, tmb_u32 *where)
{
	const struct tfs_xattr_image *head = (const struct tfs_xattr_image *)image;
	const struct tfs_xattr_entry *e;
	tmb_u32 at = sizeof(*head), len = (tmb_u32)strlen(name);

	while ((*where = at) < head->bytes && (e = tfs_next_entry(image, head->bytes, &at)))
		if (e->name_len == len && !memcmp(e + 1, name, len))
			return e;
	return NULL;
}

tmb_s64 tfs_xattr_get(struct tfs *fs, struct tfs_handle h, const char *name, void *value, tmb_u64 size)
{
	const struct tfs_xattr_entry *e;
	struct tfs_inode *inode;
	tmb_u8 *image;
	tmb_u32 where;
	tmb_s64 r = tfs_live_inode(fs, h, &inode);

	if (r)
		return r;
	if (!tmb_load(&inode->xattr_root))
		return -ENODATA;
	r = tfs_get_image(fs, h, 0, &image);
	if (r)
		return r;
	e = tfs_find(image, name, &where);
	if (!e)
		r = -ENODATA;
	else if (size && size < e->value_len)
		r = -ERANGE;
	else
		r = e->value_len;
	if (r > 0 && size)
		memcpy(value, (const char *)(e + 1) + e->name_len, (size_t)r);
	tfs_os_free(image);
	return r;
}

tmb_s64 tfs_xattr_list(struct tfs *fs, struct tfs_handle h, char *list, tmb_u64 size)
{
	const struct tfs_xattr_entry *e;
	tmb_u32 at = sizeof(struct tfs_xattr_image);
	tmb_u8 *image;
	tmb_s64 total = 0, err = tfs_get_image(fs, h, 0, &image);

	if (err)
		return err;
	while (at < ((struct tfs_xattr_image *)image)->bytes && (e = tfs_next_entry(image, ((struct tfs_xattr_image *)image)->bytes, &at))) {
		if (size && (tmb_u64)total + e->name_len + 1 > size) {
			total = -ERANGE;
			break;
		}
		if (size) {
			memcpy(list + total, e + 1, e->name_len);
			list[total + e->name_len] = 0;
		}
		total += e->name_len + 1;
	}
	tfs_os_free(image);
	return total;
}

/* Changes the private image, which has room. */
static int tfs_edit(tmb_u8 *image, const char *name, const void *value, tmb_u64 size, tmb_u32 flags)
{
	struct tfs_xattr_image *head = (struct tfs_xattr_image *)image;
	struct tfs_xattr_entry *e;
	tmb_u32 where, len = (tmb_u32)strlen(name), bytes;
	const struct tfs_xattr_entry *old = tfs_find(image, name, &where);

	if (old && flags & TFS_XATTR_CREATE)
		return -EEXIST;
	if (!old && (flags & TFS_XATTR_REPLACE || !value))
		return -ENODATA;
	if (old) {
		bytes = tfs_entry_bytes(old);
		memmove(image + where, image + where + bytes, head->bytes - where - bytes);
		head->bytes -= bytes;
		head->count--;
	}
	if (!value)
		return 0;
	e = (struct tfs_xattr_entry *)(image + head->bytes);
	memset(e, 0, sizeof(*e));
	e->name_len = (tmb_u16)len;
	e->value_len = (tmb_u32)size;
	bytes = tfs_entry_bytes(e);
	if (head->bytes + bytes > IMAGE_MAX)
		return -ENOSPC;
	memset(e + 1, 0, bytes - sizeof(*e));
	memcpy(e + 1, name, len);
	memcpy((char *)(e + 1) + len, value, size);
	head->bytes += bytes;
	head->count++;
	return 0;
}

/* --- changes: prepared in a transaction of the inode's, which is locked; done once that is committed ------------------------------- */

/* Makes the image the inode's; one without attributes: none. need not be more than it has: then a reserved block may be used. */
static int tfs_prepare(struct tfs *fs, struct tfs_inode *inode, tmb_u32 slot, const tmb_u8 *image, struct tfs_xattr_change *change)
{
	const struct tfs_xattr_image *head = (const struct tfs_xattr_image *)image;
	tmb_u64 root = 0, need = head->count ? tfs_image_blocks(head->bytes) : 0;
	int err;

	change->old = tmb_load(&inode->xattr_root);
	change->had = tfs_tree_count(fs, change->old);
	change->taken = 0;
	if (need > change->had && need - change->had > tfs_blocks_left(fs, inode))
		return -EDQUOT;
	err = need ? tfs_write_image(fs, &root, image, head->bytes, tfs_tag(fs), need <= change->had, &change->taken) : 0;
	if (err)
		return err;
	change->is_prepared = true;
	change->root = root;
	tfs_tree_mark(fs, change->old, TFS_MAP_USED, tfs_tag(fs));
	tfs_tx_word(fs, slot, &inode->xattr_root, root);
	return 0;
}

void tfs_xattr_changed(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode, const struct tfs_xattr_change *change)
{
	tmb_u64 readers;
	tmb_u8 mark;

	if (!change->is_prepared)
		return;
	tfs_tree_mark(fs, change->root, tfs_tag(fs), TFS_MAP_USED);
	tfs_count_blocks(fs, inode, (tmb_s64)(change->taken - change->had));
	if (!change->old)
		return;
	readers = tfs_reading(fs, inode, h.ino);
	mark = tfs_free_begin(fs, readers);
	tfs_tree_mark(fs, change->old, tfs_tag(fs), mark);
	tfs_free_end(fs, mark, readers);
	tfs_refill_reserve(fs);
}

/* A POSIX ACL as Linux passes it (posix_acl_xattr.h, version 2): a header, then entries. */
#define ACL_ACCESS "system.posix_acl_access"
#define ACL_HEADER 4u
struct tfs_acl_entry {
	tmb_u16 tag, permissions;
	tmb_u32 id;
};
enum { TFS_ACL_USER_OBJ = 1, TFS_ACL_GROUP_OBJ = 4, TFS_ACL_MASK = 16, TFS_ACL_OTHER = 32 };

/* Gives an ACL's entry what it has in a file with this mode; has_mask: the mode's group bits are the mask's. */
static void tfs_agree(struct tfs_acl_entry *e, tmb_u32 mode, bool has_mask)
{
	if (e->tag == TFS_ACL_USER_OBJ)
		e->permissions = mode >> 6 & 7;
	else if (e->tag == (has_mask ? TFS_ACL_MASK : TFS_ACL_GROUP_OBJ))
		e->permissions = mode >> 3 & 7;
	else if (e->tag == TFS_ACL_OTHER)
		e->permissions = mode & 7;
}

int tfs_acl_chmod(struct tfs *fs, struct tfs_handle h, struct tfs_inode *inode, tmb_u32 slot, tmb_u32 mode, struct tfs_xattr_change *change)
{
	const struct tfs_xattr_entry *found;
	struct tfs_acl_entry e;
	bool has_mask = false;
	tmb_u32 where, n;
	tmb_u8 *image, *at;
	int err;

	change->is_prepared = false;
	if (!tmb_load(&inode->xattr_root))
		return 0;
	err = tfs_get_image(fs, h, 0, &image);
	if (err)
		return err;
	found = tfs_find(image, ACL_ACCESS, &where);
	if (found && found->value_len >= ACL_HEADER) {
		at = image + where + sizeof(*found) + found->name_len + ACL_HEADER;
		n = (found->value_len - ACL_HEADER) / (tmb_u32)sizeof(e);
		for (tmb_u32 i = 0; i < n; i++) {
			memcpy(&e, at + i * sizeof(e), sizeof(e));
			has_mask |= e.tag == TFS_ACL_MASK;
		}
		for (tmb_u32 i = 0; i < n; i++) {
			memcpy(&e, at + i * sizeof(e), sizeof(e));
			tfs_agree(&e, mode, has_mask);
			memcpy(at + i * sizeof(e), &e, sizeof(e));
		}
		err = tfs_prepare(fs, inode, slot, image, change);
	}
	tfs_os_free(image);
	return err;
}

/* Returns the mode of an inode whose mode is 'old' now. */
static tmb_u64 tfs_mode_with(tmb_u64 old, tmb_u64 mode, tmb_u32 flags)
{
	tmb_u64 taken = flags & TFS_XATTR_PERMISSIONS ? 0777 : 07777;

	mode = (old & (TFS_MODE_TYPE | 07777) & ~taken) | (mode & taken);
	return flags & TFS_XATTR_KILL_SGID ? mode & ~02000ULL : mode;
}

int tfs_xattr_set(struct tfs *fs, struct tfs_handle h, const char *name, const void *value, tmb_u64 size, tmb_u32 flags, int mode,
		  const struct tfs_attr *checked, tmb_s64 now)
{
	struct tfs_xattr_change change;
	struct tfs_inode *inode;
	tmb_u8 *image;
	tmb_u32 slot;
	int err;

	if (size > TFS_XATTR_MAX)
		return -E2BIG;
	if (!*name || strlen(name) > TFS_NAME_MAX)
		return -ERANGE;
	err = tfs_tx_begin_on(fs, h, &slot, &inode);
	if (err)
		return err;
	if (!tfs_is_checked(inode, checked)) {
		err = -EAGAIN;
		goto unlock;
	}
	tfs_tx_inode(fs, slot, 0, h.ino);
	err = tfs_get_image(fs, h, (tmb_u32)(sizeof(struct tfs_xattr_entry) + strlen(name) + size + 8), &image);
	if (err)
		goto unlock;
	err = tfs_edit(image, name, value, size, flags);
	/* Setting an ACL that equals the mode removes an attribute that may not exist. */
	if (err == -ENODATA && !value && mode >= 0)
		err = 0;
	if (!err)
		err = tfs_prepare(fs, inode, slot, image, &change);
	tfs_os_free(image);
	if (err)
		goto unlock;
	if (mode >= 0)
		tfs_tx_word(fs, slot, &inode->mode, tfs_mode_with(tmb_load(&inode->mode), (tmb_u64)mode, flags));
	tfs_tx_commit(fs, slot);
	tfs_changed(inode, now, false);
	tfs_xattr_changed(fs, h, inode, &change);
unlock:
	tfs_tx_end(fs, slot);
	tfs_unlock(fs, &inode->lock);
	return err;
}
