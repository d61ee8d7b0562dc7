// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Names. A dentry, positive or negative, carries in d_time the directory's sequence number from before its lookup. It is valid while the
 * directory still has that number, or while only operations of this kernel have changed the directory since: they mark the dentries that they
 * concern (tmb_inode's own_from and own_to). Otherwise the name is looked up again.
 */
#include "tombolo.h"

#include <linux/cred.h>
#include <linux/namei.h>
#include <linux/slab.h>

#define TMB_UNSTAMPED 1ul /* odd: no unchanging directory has such a number */
#define TMB_LOOKUP_TRIES 32

/* --- when dentries are valid ------------------------------------------------------------------------------------ */

/*
 * Returns whether 'dentry' of 'dir' is valid without a lookup; *stamp gets its sequence number. Safe under RCU. The order of the loads
 * matters: a reader that sees the store of tmb_own_change() sees the marks that came before, and the sequence number is loaded last.
 */
static bool tmb_is_true(struct inode *dir, struct dentry *dentry, u64 *stamp)
{
	u64 to = smp_load_acquire(&tmb_i(dir)->own_to), from = READ_ONCE(tmb_i(dir)->own_from), seq;

	*stamp = READ_ONCE(dentry->d_time);
	smp_rmb();
	seq = tfs_dir_seq(tmb_fs(dir), tmb_h(dir));
	return !(*stamp & 1) && (seq == *stamp || (seq == to && *stamp >= from && *stamp < to));
}

/* Gives the dentry a number that no directory has, nor the dentry had before: so a validation that began earlier can't store its result. */
static void tmb_unstamp(struct dentry *dentry)
{
	WRITE_ONCE(dentry->d_time, (dentry->d_time | 1) + 2);
}

/*
 * Called once after this kernel changed names in 'dir' (locked) and unstamped the dentries that are no longer valid. Returns the sequence
 * number at which this kernel's other dentries of 'dir' are valid, or TMB_UNSTAMPED if another member changed the directory, too.
 */
static u64 tmb_own_change(struct inode *dir, u64 before)
{
	struct tmb_inode *ti = tmb_i(dir);
	u64 now = tfs_dir_seq(tmb_fs(dir), tmb_h(dir));

	if (before & 1 || now != before + 2)
		return TMB_UNSTAMPED;
	if (ti->own_to != before)
		WRITE_ONCE(ti->own_from, before);
	smp_store_release(&ti->own_to, now);
	return now;
}

/* --- lookup and validation --------------------------------------------------------------------------------- */

/* Returns the handle's inode. hold: a regular file is held (tmb_hold). */
static struct inode *tmb_get(struct super_block *sb, struct tfs_handle h, bool hold)
{
	struct inode *inode = tmb_iget(sb, h);
	int err;

	if (!hold || IS_ERR(inode) || !S_ISREG(inode->i_mode))
		return inode;
	err = tmb_hold(inode);
	if (!err)
		return inode;
	iput(inode);
	return ERR_PTR(err);
}

static void tmb_put(struct inode *inode, bool hold)
{
	if (inode && hold && S_ISREG(inode->i_mode))
		tmb_unhold(inode);
	iput(inode);
}

/*
 * Looks 'name' up: *inode (NULL: none), and the sequence number at which that is valid. In a directory that keeps changing, the answer was
 * valid at some moment of the call, and is unstamped. hold: as in tmb_get().
 */
static int tmb_find(struct inode *dir, const struct qstr *name, bool hold, struct inode **inode, u64 *stamp)
{
	struct tfs *fs = tmb_fs(dir);
	int tries, err = 0;

	*inode = NULL;
	for (tries = 0; tries < TMB_LOOKUP_TRIES; tries++) {
		u64 seq = tfs_dir_seq(fs, tmb_h(dir));
		struct tfs_handle h;
		u8 type;

		err = tfs_lookup(fs, tmb_h(dir), name->name, name->len, &h, &type);
		if (!err) {
			*inode = tmb_get(dir->i_sb, h, hold);
			if (IS_ERR(*inode)) {
				err = PTR_ERR(*inode);
				*inode = NULL;
			}
		}
		if (err && err != -ENOENT && err != -ESTALE)
			return err;
		*stamp = seq & 1 ? TMB_UNSTAMPED : seq;
		if (tfs_dir_seq(fs, tmb_h(dir)) == seq && err != -ESTALE)
			return err == -ENOENT ? 0 : err;
		if (tries + 1 < TMB_LOOKUP_TRIES) {
			tmb_put(*inode, hold);
			*inode = NULL;
			cond_resched();
		}
	}
	*stamp = TMB_UNSTAMPED;
	return err == -ENOENT ? 0 : err;
}

static struct dentry *tmb_look_up(struct inode *dir, struct dentry *dentry, bool hold)
{
	struct inode *inode;
	struct dentry *alias, *old;
	u64 stamp;
	int err;

	if (dentry->d_name.len > TFS_NAME_MAX)
		return ERR_PTR(-ENAMETOOLONG);
	err = tmb_find(dir, &dentry->d_name, hold, &inode, &stamp);
	if (err)
		return ERR_PTR(err);
	dentry->d_time = stamp;
	alias = d_splice_alias(inode, dentry);
	if (alias == ERR_PTR(-ESTALE)) {
		/* Another member moved a directory whose dentry can't follow during a rename here. If that dentry is unused, it can go. */
		err = tmb_find(dir, &dentry->d_name, hold, &inode, &stamp);
		if (err)
			return ERR_PTR(err);
		old = inode ? d_find_any_alias(inode) : NULL;
		if (old) {
			d_invalidate(old);
			dput(old);
		}
		dentry->d_time = stamp;
		alias = d_splice_alias(inode, dentry);
	}
	if (!IS_ERR_OR_NULL(alias))
		alias->d_time = stamp;
	return alias;
}

static struct dentry *tmb_lookup(struct inode *dir, struct dentry *dentry, unsigned int flags)
{
	return tmb_look_up(dir, dentry, false);
}

/* Returns whether 'name' still means 'inode' (NULL: none): 1, 0 or an error; *stamp as tmb_find() gives it. Makes no inode. */
static int tmb_still(struct inode *dir, const struct qstr *name, struct inode *inode, u64 *stamp)
{
	struct tfs *fs = tmb_fs(dir);
	u64 seq = tfs_dir_seq(fs, tmb_h(dir));
	struct tfs_handle h;
	u8 type;
	int err = tfs_lookup(fs, tmb_h(dir), name->name, name->len, &h, &type);

	if (err && err != -ENOENT)
		return err == -ESTALE ? 0 : err;
	if (!err != !!inode)
		return 0;
	if (inode && (h.ino != inode->i_ino || h.generation != tmb_i(inode)->generation))
		return 0;
	/* If the directory changed meanwhile, the answer was valid at some moment of the call. */
	*stamp = seq & 1 || tfs_dir_seq(fs, tmb_h(dir)) != seq ? TMB_UNSTAMPED : seq;
	return 1;
}

/*
 * The VFS checks an inode's owner, mode and flags before it calls an operation (sticky directories, protected links, immutable files). So they are
 * renewed with the name. The operation meets an error again. Safe under RCU.
 */
static void tmb_renew(struct inode *inode)
{
	if (inode)
		tmb_refresh(inode);
}

/* A dentry of O_TMPFILE or of a file handle, which overlayfs keeps and asks for: it is valid as long as its inode lives. */
static bool tmb_is_nameless(const struct dentry *dentry)
{
	return IS_ROOT(dentry) || dentry->d_fsdata == &tmb_dentry_ops;
}

static int tmb_d_revalidate(TMB_REVALIDATE_ARGS)
{
	struct name_snapshot name;
	struct dentry *parent;
	struct inode *dir;
	u64 stamp, now;
	int valid;

	if (tmb_is_nameless(dentry)) {
		struct inode *inode = d_inode_rcu(dentry);

		return inode && !tmb_refresh(inode);
	}
	if (flags & LOOKUP_RCU) {
		dir = d_inode_rcu(READ_ONCE(dentry->d_parent));
		if (!dir || !tmb_is_true(dir, dentry, &stamp))
			return -ECHILD;
		tmb_renew(d_inode_rcu(dentry));
		return 1;
	}
	/* The second walk of an open that found a file removed after its lookup: tmb_atomic_open() holds what it looks up. */
	if (flags & LOOKUP_REVAL && flags & LOOKUP_OPEN && d_is_reg(dentry) && !d_mountpoint(dentry))
		return 0;
	parent = dget_parent(dentry);
	dir = d_inode(parent);
	if (tmb_is_true(dir, dentry, &stamp)) {
		dput(parent);
		tmb_renew(d_inode(dentry));
		return 1;
	}
	take_dentry_name_snapshot(&name, dentry);
	valid = tmb_still(dir, &name.name, d_inode(dentry), &now);
	release_dentry_name_snapshot(&name);
	dput(parent);
	/* Not if an operation of this kernel has marked it meanwhile. */
	if (valid > 0 && !(now & 1))
		cmpxchg(&dentry->d_time, stamp, now);
	if (valid > 0)
		tmb_renew(d_inode(dentry));
	return valid;
}

/* Drops the dentry of an inode that another member unlinked: its last user here frees the inode. */
static int tmb_d_delete(const struct dentry *dentry)
{
	struct inode *inode = d_inode(dentry);

	return inode && !READ_ONCE(inode->i_nlink);
}

const struct dentry_operations tmb_dentry_ops = {
	.d_revalidate = tmb_d_revalidate,
	.d_delete = tmb_d_delete,
};

/* --- making -------------------------------------------------------------------------------------------------- */

/*
 * Makes an inode with a name, or without (name NULL). The inode is held (tmb_hold): it stays alive if another member removes the name at once.
 * Otherwise the operation would fail with ESTALE after it had made the name, and the VFS would make the name again.
 */
static struct inode *tmb_make(tmb_idmap *idmap, struct inode *dir, const struct qstr *name, umode_t mode, dev_t rdev, const char *target)
{
	struct tfs *fs = tmb_fs(dir);
	struct tfs_create c = {};
	struct inode *inode;
	void *image = NULL;
	struct tfs_handle h;
	int err;

	if (name && name->len > TFS_NAME_MAX)
		return ERR_PTR(-ENAMETOOLONG);
	err = tmb_refresh(dir);
	if (err)
		return ERR_PTR(err);
	if (!S_ISLNK(mode)) {
		err = tmb_initial_xattrs(dir, &mode, &image, &c.xattrs_len);
		if (err)
			return ERR_PTR(err);
		c.xattrs = image;
	}
	c.uid = from_kuid(&init_user_ns, mapped_fsuid(idmap, i_user_ns(dir)));
	c.gid = from_kgid(&init_user_ns, mapped_fsgid(idmap, i_user_ns(dir)));
	if (dir->i_mode & S_ISGID) {
		c.gid = from_kgid(&init_user_ns, dir->i_gid);
		if (S_ISDIR(mode))
			mode |= S_ISGID;
	}
	/* The VFS has done it by the directory's mode and group that this kernel knew. */
	mode = mode_strip_sgid(idmap, dir, mode);
	c.mode = mode;
	c.rdev = (u64)MAJOR(rdev) << MINORBITS | MINOR(rdev);
	c.symlink = target;
	c.symlink_len = target ? strlen(target) : 0;
	c.open = true;
	c.now = tfs_os_now();
	if (c.uid == (uid_t)-1 || c.gid == (gid_t)-1)
		err = -EOVERFLOW;
	else
		err = tfs_create(fs, tmb_h(dir), name ? (const char *)name->name : NULL, name ? name->len : 0, &c, &h);
	kfree(image);
	if (err)
		return ERR_PTR(err);
	inode = tmb_iget(dir->i_sb, h);
	/* The zone's inode has this member's open bit; this makes it the inode's. */
	err = PTR_ERR_OR_ZERO(inode);
	if (!err) {
		err = tmb_hold(inode);
		if (!err)
			return inode;
		iput(inode);
	}
	tfs_close_ref(fs, h);
	return ERR_PTR(err);
}

/* opens: the caller opens the inode, then calls tmb_unhold(). */
static int tmb_make_named(tmb_idmap *idmap, struct inode *dir, struct dentry *dentry, umode_t mode, dev_t rdev, const char *target, bool opens)
{
	u64 before = tfs_dir_seq(tmb_fs(dir), tmb_h(dir));
	struct inode *inode = tmb_make(idmap, dir, &dentry->d_name, mode, rdev, target);

	if (IS_ERR(inode)) {
		/* Another member made the name: no negative dentry may stay. */
		if (PTR_ERR(inode) == -EEXIST)
			d_drop(dentry);
		return PTR_ERR(inode);
	}
	tmb_tell_name(dir, &dentry->d_name, inode, FS_CREATE);
	if (!opens)
		tmb_unhold(inode);
	if (S_ISDIR(mode)) {
		struct dentry *alias;

		/* Another member may have moved it here, and a lookup of this kernel found it: then it has a dentry already. */
		d_drop(dentry);
		dentry->d_time = TMB_UNSTAMPED;
		alias = d_splice_alias(inode, dentry);
		if (IS_ERR(alias))
			return PTR_ERR(alias);
		if (alias) {
			dput(alias);
			return 0;
		}
	} else {
		d_instantiate(dentry, inode);
	}
	WRITE_ONCE(dentry->d_time, tmb_own_change(dir, before));
	return 0;
}

/* A regular file that is not opened: mknod(2), and other file systems on top of this one. */
static int tmb_create(tmb_idmap *idmap, struct inode *dir, struct dentry *dentry, umode_t mode TMB_CREATE_EXCL)
{
	return tmb_make_named(idmap, dir, dentry, mode, 0, NULL, false);
}

/* Opens the file that a lookup found and holds. The VFS checks permissions after this, too: what it will refuse is left to it unopened. */
static int tmb_open_held(struct file *file, struct dentry *dentry, unsigned int flags)
{
	int mask = MAY_OPEN | ACC_MODE(flags) | (flags & O_TRUNC ? MAY_WRITE : 0), err;
	struct inode *inode = d_inode(dentry);

	if (!S_ISREG(inode->i_mode))
		return finish_no_open(file, NULL);
	if (flags & (O_DIRECTORY | O_EXCL) || inode_permission(tmb_file_idmap(file), inode, mask))
		err = finish_no_open(file, NULL);
	else
		err = finish_open(file, dentry, NULL);
	tmb_unhold(inode);
	return err;
}

static int tmb_create_and_open(struct inode *dir, struct dentry *dentry, struct file *file, umode_t mode)
{
	int err = tmb_make_named(tmb_file_idmap(file), dir, dentry, S_IFREG | mode, 0, NULL, true);

	if (err)
		return err;
	file->f_mode |= FMODE_CREATED;
	err = finish_open(file, dentry, NULL);
	tmb_unhold(d_inode(dentry));
	return err;
}

/*
 * Makes and opens a file in one step, or opens the one that is there. If another member makes the name meanwhile, it is looked up again: the VFS walks
 * a path only twice before it fails with ESTALE. Each further try means that other members have removed the name and made it.
 */
static int tmb_atomic_open(struct inode *dir, struct dentry *dentry, struct file *file, unsigned int flags, umode_t mode)
{
	struct dentry *found = NULL;
	unsigned int tries;

	if (d_in_lookup(dentry))
		found = tmb_look_up(dir, dentry, true);
	for (tries = 0; tries < TMB_LOOKUP_TRIES; tries++) {
		int err;

		if (IS_ERR(found))
			return PTR_ERR(found);
		if (found) /* another dentry: that of a directory */
			return finish_no_open(file, found);
		if (d_really_is_positive(dentry))
			return tmb_open_held(file, dentry, flags);
		if (!(flags & O_CREAT))
			return finish_no_open(file, NULL);
		err = tmb_create_and_open(dir, dentry, file, mode);
		if (err != -EEXIST || flags & O_EXCL)
			return err;
		cond_resched();
		found = tmb_look_up(dir, dentry, true);
	}
	return -ESTALE;
}

static int tmb_mknod(tmb_idmap *idmap, struct inode *dir, struct dentry *dentry, umode_t mode, dev_t rdev)
{
	return tmb_make_named(idmap, dir, dentry, mode, rdev, NULL, false);
}

static tmb_mkdir_result tmb_mkdir(tmb_idmap *idmap, struct inode *dir, struct dentry *dentry, umode_t mode)
{
	return tmb_mkdir_returns(tmb_make_named(idmap, dir, dentry, S_IFDIR | mode, 0, NULL, false));
}

static int tmb_symlink(tmb_idmap *idmap, struct inode *dir, struct dentry *dentry, const char *target)
{
	if (strlen(target) > TFS_SYMLINK_MAX)
		return -ENAMETOOLONG;
	return tmb_make_named(idmap, dir, dentry, S_IFLNK | 0777, 0, target, false);
}

static int tmb_tmpfile(tmb_idmap *idmap, struct inode *dir, struct file *file, umode_t mode)
{
	struct inode *inode = tmb_make(idmap, dir, NULL, mode, 0, NULL);
	int err;

	if (IS_ERR(inode))
		return finish_open_simple(file, PTR_ERR(inode));
	/* d_tmpfile() counts one link down. */
	spin_lock(&inode->i_lock);
	set_nlink(inode, 1);
	spin_unlock(&inode->i_lock);
	d_tmpfile(file, inode);
	file->f_path.dentry->d_fsdata = (void *)&tmb_dentry_ops; /* tmb_is_nameless */
	err = finish_open_simple(file, 0);
	tmb_unhold(inode);
	return err;
}

static int tmb_link(struct dentry *old, struct inode *dir, struct dentry *dentry)
{
	struct inode *inode = d_inode(old);
	u64 before = tfs_dir_seq(tmb_fs(dir), tmb_h(dir));
	int err;

	if (dentry->d_name.len > TFS_NAME_MAX)
		return -ENAMETOOLONG;
	err = tmb_refresh(inode);
	if (err)
		return err;
	/* The VFS has checked the flags that this kernel knew. */
	if (IS_IMMUTABLE(inode) || IS_APPEND(inode))
		return -EPERM;
	/* Binds the inode number to this file. */
	err = tmb_hold(inode);
	if (err)
		return err;
	err = tfs_link(tmb_fs(dir), tmb_h(dir), dentry->d_name.name, dentry->d_name.len, tmb_h(inode), tfs_os_now());
	tmb_refresh(inode);
	tmb_unhold(inode);
	if (err) {
		if (err == -EEXIST)
			d_drop(dentry);
		return err;
	}
	tmb_tell_name(dir, &dentry->d_name, inode, FS_CREATE);
	ihold(inode);
	d_instantiate(dentry, inode);
	WRITE_ONCE(dentry->d_time, tmb_own_change(dir, before));
	return 0;
}

/* --- removing and renaming ----------------------------------------------------------------------------------- */

static int tmb_remove(struct inode *dir, struct dentry *dentry, bool directory)
{
	struct inode *inode = d_inode(dentry);
	struct tfs *fs = tmb_fs(dir);
	const struct qstr *name = &dentry->d_name;
	u64 before = tfs_dir_seq(fs, tmb_h(dir));
	int err = tmb_hold_unlinked(dentry);

	if (err)
		return err;
	err = (directory ? tfs_rmdir : tfs_unlink)(fs, tmb_h(dir), name->name, name->len, tmb_h(inode), tfs_os_now());
	if (err) {
		if (err == -ENOENT || err == -ESTALE)
			d_drop(dentry);
		tmb_unreference(inode);
		return err;
	}
	/* Other links or openers may keep it in this kernel. */
	if (tmb_refresh(inode)) {
		spin_lock(&inode->i_lock);
		if (inode->i_nlink)
			clear_nlink(inode);
		spin_unlock(&inode->i_lock);
	}
	tmb_tell_name(dir, name, inode, FS_DELETE | (inode->i_nlink ? 0 : FS_DELETE_SELF));
	tmb_unreference(inode);
	tmb_unstamp(dentry);
	tmb_own_change(dir, before);
	return 0;
}

static int tmb_unlink(struct inode *dir, struct dentry *dentry)
{
	return tmb_remove(dir, dentry, false);
}

static int tmb_rmdir(struct inode *dir, struct dentry *dentry)
{
	return tmb_remove(dir, dentry, true);
}

/* In a sticky directory the VFS allowed the rename because of the owner of the name's inode: the name must still mean that inode. */
static struct tfs_handle tmb_expected(struct inode *dir, struct dentry *dentry)
{
	if (!(dir->i_mode & S_ISVTX))
		return (struct tfs_handle){};
	return d_is_positive(dentry) ? tmb_h(d_inode(dentry)) : (struct tfs_handle){ .ino = TFS_NOTHING };
}

static int tmb_rename(tmb_idmap *idmap, struct inode *old_dir, struct dentry *old, struct inode *new_dir, struct dentry *new,
		      unsigned int flags)
{
	struct inode *target = d_inode(new);
	u64 old_before = tfs_dir_seq(tmb_fs(old_dir), tmb_h(old_dir)), new_before = tfs_dir_seq(tmb_fs(new_dir), tmb_h(new_dir));
	u32 how = 0;
	int err;

	if (flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT))
		return -EINVAL;
	if (new->d_name.len > TFS_NAME_MAX)
		return -ENAMETOOLONG;
	if (flags & RENAME_NOREPLACE)
		how |= TFS_RENAME_NOREPLACE;
	if (flags & RENAME_EXCHANGE)
		how |= TFS_RENAME_EXCHANGE;
	if (flags & RENAME_WHITEOUT)
		how |= TFS_RENAME_WHITEOUT;
	if (target && !(flags & RENAME_EXCHANGE)) {
		err = tmb_hold_unlinked(new);
		if (err)
			return err;
	}
	err = tfs_rename(tmb_fs(old_dir),
			 &(struct tfs_name){ tmb_h(old_dir), old->d_name.name, old->d_name.len, tmb_expected(old_dir, old) },
			 &(struct tfs_name){ tmb_h(new_dir), new->d_name.name, new->d_name.len, tmb_expected(new_dir, new) }, how,
			 tfs_os_now());
	tmb_unstamp(old);
	tmb_unstamp(new);
	if (err) {
		if (target)
			tmb_unreference(target);
		return err;
	}
	tmb_own_change(new_dir, new_before);
	if (old_dir != new_dir)
		tmb_own_change(old_dir, old_before);
	tmb_tell_move(old_dir, &old->d_name, new_dir, &new->d_name, d_inode(old));
	if (target && flags & RENAME_EXCHANGE)
		tmb_tell_move(new_dir, &new->d_name, old_dir, &old->d_name, target);
	tmb_refresh(d_inode(old));
	if (target && tmb_refresh(target)) {
		spin_lock(&target->i_lock);
		if (target->i_nlink)
			clear_nlink(target);
		spin_unlock(&target->i_lock);
	}
	if (target && !(flags & RENAME_EXCHANGE))
		tmb_tell_inode(target, FS_ATTRIB | (target->i_nlink ? 0 : FS_DELETE_SELF));
	if (target)
		tmb_unreference(target);
	return 0;
}

/* --- reading a directory --------------------------------------------------------------------------------------- */

struct tmb_readdir_context {
	struct dir_context *dir;
	bool full;
};

/* Positions 0 and 1 are "." and "..", the core's follow. */
static bool tmb_emit(void *data, const char *name, tmb_u32 len, tmb_u64 ino, tmb_u8 type, tmb_u64 next_pos)
{
	struct tmb_readdir_context *c = data;

	if (!dir_emit(c->dir, name, len, ino, type))
		return false;
	c->dir->pos = next_pos + 2;
	return true;
}

static int tmb_iterate(struct file *file, struct dir_context *dir)
{
	struct inode *inode = file_inode(file);
	struct tfs *fs = tmb_fs(inode);
	struct tmb_readdir_context c = { .dir = dir };
	u64 pos;
	int err = tmb_refresh(inode);

	if (err)
		return err == -ESTALE ? -ENOENT : err;
	if (dir->pos == 0) {
		if (!dir_emit(dir, ".", 1, inode->i_ino, DT_DIR))
			return 0;
		dir->pos = 1;
	}
	if (dir->pos == 1) {
		u64 parent = inode == d_inode(inode->i_sb->s_root) ? inode->i_ino : tfs_parent(fs, tmb_h(inode));

		if (!dir_emit(dir, "..", 2, parent ? parent : inode->i_ino, DT_DIR))
			return 0;
		dir->pos = 2;
	}
	if (dir->pos < 2)
		return -EINVAL;
	pos = dir->pos - 2;
	err = tfs_readdir(fs, tmb_h(inode), &pos, tmb_emit, &c);
	if (err)
		return err;
	dir->pos = pos + 2;
	file_accessed(file);
	return 0;
}

static loff_t tmb_dir_llseek(struct file *file, loff_t offset, int whence)
{
	/* Positions are cookies: any value that iterate gave may be passed. */
	return generic_file_llseek_size(file, offset, whence, S64_MAX, i_size_read(file_inode(file)));
}

static int tmb_dir_fsync(struct file *file, loff_t start, loff_t end, int datasync)
{
	return 0;
}

const struct file_operations tmb_dir_fops = {
	.owner = THIS_MODULE,
	.open = tmb_open_inode,
	.release = tmb_release_inode,
	.read = generic_read_dir,
	.iterate_shared = tmb_iterate,
	.llseek = tmb_dir_llseek,
	.flock = tmb_flock,
	TMB_NO_LEASE
	.fsync = tmb_dir_fsync,
};

const struct inode_operations tmb_dir_iops = {
	.lookup = tmb_lookup,
	.create = tmb_create,
	.atomic_open = tmb_atomic_open,
	.mknod = tmb_mknod,
	.mkdir = tmb_mkdir,
	.symlink = tmb_symlink,
	.tmpfile = tmb_tmpfile,
	.link = tmb_link,
	.unlink = tmb_unlink,
	.rmdir = tmb_rmdir,
	.rename = tmb_rename,
	.getattr = tmb_getattr,
	.setattr = tmb_setattr,
	.permission = tmb_permission,
	.listxattr = tmb_listxattr,
	.update_time = tmb_update_time,
	.fileattr_get = tmb_fileattr_get,
	.fileattr_set = tmb_fileattr_set,
	TMB_ACL_OPS,
};
