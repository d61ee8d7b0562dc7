// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * VFS inodes. Number and generation identify an inode. Its attributes are copies that tmb_refresh() renews from the zone before this kernel uses
 * them. While a file is open here, the zone's inode carries this member's open bit.
 */
#include "tombolo.h"

#include <linux/cred.h>
#include <linux/fileattr.h>
#include <linux/pagemap.h>
#include <linux/slab.h>
#include <linux/xattr.h>

#define TMB_CHECK_TRIES 100 /* each further one means that another member has changed the inode's owner or flags */

struct tmb_iget_key {
	u64 ino;
	u32 generation;
};

static int tmb_iget_test(struct inode *inode, void *data)
{
	struct tmb_iget_key *k = data;

	return inode->i_ino == k->ino && tmb_i(inode)->generation == k->generation;
}

static int tmb_iget_set(struct inode *inode, void *data)
{
	struct tmb_iget_key *k = data;

	inode->i_ino = k->ino;
	inode->i_generation = k->generation;
	tmb_i(inode)->generation = k->generation;
	return 0;
}

/*
 * Stores attributes in the VFS's inode. The caller holds i_lock, and has held it since it read them: a refresh that was held up on its way replaces no
 * newer ones, and two concurrent ones don't confuse the super block's count of unlinked inodes.
 */
static void tmb_apply(struct inode *inode, const struct tfs_attr *a)
{
	struct tmb_inode *ti = tmb_i(inode);
	unsigned int flags = 0;

	inode->i_mode = a->mode;
	/* As i_uid_write() does it for a super block of the initial user name space, which this one always is. */
	inode->i_uid = KUIDT_INIT(a->uid);
	inode->i_gid = KGIDT_INIT(a->gid);
	if (inode->i_nlink != a->nlink)
		set_nlink(inode, a->nlink);
	i_size_write(inode, a->size);
	inode->i_blocks = a->blocks << (TFS_BLOCK_SHIFT - 9);
	inode_set_atime_to_ts(inode, ns_to_timespec64(a->atime));
	inode_set_mtime_to_ts(inode, ns_to_timespec64(a->mtime));
	inode_set_ctime_to_ts(inode, ns_to_timespec64(a->ctime));
	if (a->flags & TFS_FL_IMMUTABLE)
		flags |= S_IMMUTABLE;
	if (a->flags & TFS_FL_APPEND)
		flags |= S_APPEND;
	if ((inode->i_flags & (S_IMMUTABLE | S_APPEND)) != flags)
		inode_set_flags(inode, flags, S_IMMUTABLE | S_APPEND);
	/* Last: a reader that finds it equal to the zone's uses the fields above. */
	smp_wmb();
	ti->seen = *a;
}

/* Returns whether the copies equal the zone's attributes. */
static bool tmb_fresh(struct inode *inode)
{
	struct tmb_inode *ti = tmb_i(inode);
	bool same = i_size_read(inode) == ti->seen.size && inode->i_nlink == ti->seen.nlink &&
		    tfs_attr_same(tmb_fs(inode), &ti->seen);

	smp_rmb();
	return same;
}

/* Not inlined: copies that are fresh need no room for others on the stack. */
static noinline int tmb_load_attributes(struct inode *inode)
{
	struct tfs_attr a;
	int err;

	spin_lock(&inode->i_lock);
	err = tfs_getattr(tmb_fs(inode), tmb_h(inode), &a);
	if (!err && (a.mode ^ inode->i_mode) & S_IFMT) {
		tfs_os_damage(tmb_fs(inode), "an inode changed its type", inode->i_ino, a.mode);
		err = -EUCLEAN;
	}
	if (!err)
		tmb_apply(inode, &a);
	spin_unlock(&inode->i_lock);
	return err;
}

/* Renews the copies. -ESTALE: the file is gone; -EUCLEAN: the zone is damaged. Safe under RCU. */
int tmb_refresh(struct inode *inode)
{
	return tmb_fresh(inode) ? 0 : tmb_load_attributes(inode);
}

/* Renews the copy of the size alone, which is less work. The caller may hold the core's lock of the inode. */
void tmb_refresh_size(struct inode *inode)
{
	spin_lock(&inode->i_lock);
	i_size_write(inode, tfs_size(tmb_fs(inode), tmb_h(inode)));
	spin_unlock(&inode->i_lock);
}

/*
 * Renews the copies and gives them. A caller takes them before it checks rights by the inode, and passes them to the core, which compares them under its
 * lock: a chmod that its file's owner may do has to wait, and meanwhile another member gives the file to root.
 */
int tmb_refresh_to(struct inode *inode, struct tfs_attr *a)
{
	int err = tmb_refresh(inode);

	spin_lock(&inode->i_lock);
	*a = tmb_i(inode)->seen;
	spin_unlock(&inode->i_lock);
	return err;
}

/* Returns whether the caller checks its rights once more, since the core found others (-EAGAIN). */
bool tmb_check_again(int *err, unsigned int *tries)
{
	if (*err != -EAGAIN)
		return false;
	if (++*tries < TMB_CHECK_TRIES)
		return true;
	*err = -ESTALE;
	return false;
}

/* Returns the handle's inode with current attributes. -ESTALE: there is none. */
struct inode *tmb_iget(struct super_block *sb, struct tfs_handle h)
{
	struct tfs *fs = &tmb_sb(sb)->fs;
	u64 ino = h.ino;
	struct tmb_iget_key key = { .ino = ino };
	struct inode *inode;
	struct tfs_attr a;
	int err = tfs_getattr(fs, h, &a);

	if (err)
		return ERR_PTR(err);
	key.generation = a.generation;
	inode = iget5_locked(sb, ino, tmb_iget_test, tmb_iget_set, &key);
	if (!inode)
		return ERR_PTR(-ENOMEM);
	if (!tmb_is_new(inode)) {
		err = tmb_refresh(inode);
		if (!err)
			return inode;
		iput(inode);
		return ERR_PTR(err);
	}
	spin_lock(&inode->i_lock);
	tmb_apply(inode, &a);
	spin_unlock(&inode->i_lock);
	cache_no_acl(inode);
	inode->i_acl = inode->i_default_acl = ACL_DONT_CACHE;
	switch (a.mode & S_IFMT) {
	case S_IFREG:
		inode->i_op = &tmb_file_iops;
		inode->i_fop = &tmb_file_fops;
		inode->i_mapping->a_ops = &tmb_aops;
		inode->i_flags |= S_DAX;
		break;
	case S_IFDIR:
		inode->i_op = &tmb_dir_iops;
		inode->i_fop = &tmb_dir_fops;
		break;
	case S_IFLNK:
		inode->i_op = &tmb_symlink_iops;
		break;
	case S_IFCHR:
	case S_IFBLK:
	case S_IFIFO:
	case S_IFSOCK:
		inode->i_op = &tmb_special_iops;
		init_special_inode(inode, a.mode, MKDEV((a.rdev >> MINORBITS) & ((1u << 12) - 1), a.rdev & MINORMASK));
		break;
	default:
		tfs_os_damage(fs, "an inode of no known type", ino, a.mode);
		iget_failed(inode);
		return ERR_PTR(-EUCLEAN);
	}
	unlock_new_inode(inode);
	return inode;
}

/* --- references of openers ---------------------------------------------------------------------------- */

/* A reference to give back in the zone, of an inode that this kernel has evicted. */
struct tmb_closing {
	struct list_head link;
	struct work_struct work;
	struct tmb_sb *s;
	struct tfs_handle h;
	enum { TMB_CLOSE_QUEUED, TMB_CLOSE_RUNS, TMB_CLOSE_TAKEN_OVER } state;
};

static void tmb_close_ref(struct work_struct *work)
{
	struct tmb_closing *c = container_of(work, struct tmb_closing, work);
	struct tmb_sb *s = c->s;
	bool runs;

	spin_lock(&s->closing_lock);
	runs = c->state == TMB_CLOSE_QUEUED;
	if (runs)
		c->state = TMB_CLOSE_RUNS;
	spin_unlock(&s->closing_lock);
	if (runs)
		tfs_close_ref(&s->fs, c->h);
	spin_lock(&s->closing_lock);
	list_del(&c->link);
	spin_unlock(&s->closing_lock);
	kfree(c);
	wake_up_all(&s->closed);
}

/* Returns a reference of an earlier inode of this file that is in this state; NULL: there is none. The caller holds closing_lock. */
static struct tmb_closing *tmb_find_closing(struct tmb_sb *s, struct tfs_handle h, int state)
{
	struct tmb_closing *c;

	list_for_each_entry(c, &s->closing, link)
		if (c->h.ino == h.ino && c->h.generation == h.generation && c->state == state)
			return c;
	return NULL;
}

static bool tmb_closing_now(struct tmb_sb *s, struct tfs_handle h)
{
	bool yes;

	spin_lock(&s->closing_lock);
	yes = tmb_find_closing(s, h, TMB_CLOSE_RUNS);
	spin_unlock(&s->closing_lock);
	return yes;
}

/* Takes over the reference of an earlier inode of this file that waits to be given back; false: there is none. */
static bool tmb_take_over(struct tmb_sb *s, struct tfs_handle h)
{
	struct tmb_closing *c;

	spin_lock(&s->closing_lock);
	c = tmb_find_closing(s, h, TMB_CLOSE_QUEUED);
	if (c)
		c->state = TMB_CLOSE_TAKEN_OVER;
	spin_unlock(&s->closing_lock);
	return c;
}

void tmb_closing_start(struct tmb_sb *s)
{
	spin_lock_init(&s->closing_lock);
	INIT_LIST_HEAD(&s->closing);
	init_waitqueue_head(&s->closed);
}

/*
 * Returns whether a work item of its own gives the reference back. The last user of a removed file may have to wait for other members' locks. Neither
 * reclaim nor the worker may wait: the locks' owners may be waiting for them.
 */
static bool tmb_close_later(struct inode *inode)
{
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tmb_closing *c;

	if (!(current->flags & (PF_MEMALLOC | PF_WQ_WORKER)))
		return false;
	c = kmalloc(sizeof(*c), GFP_NOWAIT | __GFP_NOWARN);
	if (!c)
		return false;
	INIT_WORK(&c->work, tmb_close_ref);
	c->s = s;
	c->h = tmb_h(inode);
	c->state = TMB_CLOSE_QUEUED;
	spin_lock(&s->closing_lock);
	list_add_tail(&c->link, &s->closing);
	spin_unlock(&s->closing_lock);
	queue_work(s->lock_queue, &c->work);
	return true;
}

static int tmb_reference_locked(struct inode *inode)
{
	struct tmb_inode *ti = tmb_i(inode);
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	int err;

	if (ti->referenced)
		return 0;
	/*
	 * The zone has one bit for all of this member's users of a file. If an earlier inode of the file is queued to clear it, this one takes the
	 * reference over; if it is clearing it now, this one waits. It does not wait for other files' references, which may take long. The earlier inode was
	 * queued before this one was made.
	 */
	if (!list_empty(&s->closing)) {
		if (tmb_take_over(s, tmb_h(inode))) {
			ti->referenced = true;
			return 0;
		}
		err = wait_event_killable(s->closed, !tmb_closing_now(s, tmb_h(inode)));
		if (err)
			return err;
	}
	err = tfs_open_ref(tmb_fs(inode), tmb_h(inode));
	if (!err)
		ti->referenced = true;
	return err;
}

/* Keeps the file alive in the zone until this inode is evicted (or opened and closed). */
int tmb_reference(struct inode *inode)
{
	int err = mutex_lock_killable(&tmb_i(inode)->lock);

	if (err)
		return err;
	err = tmb_reference_locked(inode);
	mutex_unlock(&tmb_i(inode)->lock);
	return err;
}

/*
 * Called before a name is removed: keeps the file for users in this kernel that have no open file of it (O_PATH, a working directory). Not needed
 * if only this name's dentry refers to the inode.
 */
int tmb_hold_unlinked(struct dentry *dentry)
{
	struct inode *inode = d_inode(dentry);

	if (d_count(dentry) <= 1 && atomic_read(&inode->i_count) <= 1)
		return 0;
	return tmb_reference(inode);
}

/* Called after an operation that needed a reference only while it ran, or left other names. */
void tmb_unreference(struct inode *inode)
{
	struct tmb_inode *ti = tmb_i(inode);

	mutex_lock(&ti->lock);
	if (!ti->opens && ti->referenced && !READ_ONCE(ti->mapped) && inode->i_nlink) {
		ti->referenced = false;
		tfs_close_ref(tmb_fs(inode), tmb_h(inode));
	}
	mutex_unlock(&ti->lock);
}

/* Keeps the file alive in the zone as an open of it does. */
int tmb_hold(struct inode *inode)
{
	struct tmb_inode *ti = tmb_i(inode);
	int err = mutex_lock_killable(&ti->lock);

	if (err)
		return err;
	err = tmb_reference_locked(inode);
	if (!err)
		ti->opens++;
	mutex_unlock(&ti->lock);
	return err;
}

void tmb_unhold(struct inode *inode)
{
	struct tmb_inode *ti = tmb_i(inode);
	bool last;

	mutex_lock(&ti->lock);
	last = !--ti->opens;
	mutex_unlock(&ti->lock);
	if (!last)
		return;
	tmb_mappings_close(inode);
	tmb_unreference(inode);
}

int tmb_open_inode(struct inode *inode, struct file *file)
{
	int err = tmb_refresh(inode);

	tmb_hush(file);
	if (!err && S_ISREG(inode->i_mode))
		err = generic_file_open(inode, file);
	return err ? err : tmb_hold(inode);
}

int tmb_release_inode(struct inode *inode, struct file *file)
{
	if (file->f_mode & FMODE_WRITE && !tmb_opened_for_mapping(file))
		tmb_tell(file_dentry(file), FS_CLOSE_WRITE);
	tmb_release_mappings(file);
	tmb_unhold(inode);
	return 0;
}

void tmb_evict_inode(struct inode *inode)
{
	struct tmb_inode *ti = tmb_i(inode);

	WARN_ON_ONCE(ti->mapped);
	truncate_inode_pages_final(&inode->i_data);
	clear_inode(inode);
	if (ti->referenced) {
		ti->referenced = false;
		if (!tmb_close_later(inode))
			tfs_close_ref(tmb_fs(inode), tmb_h(inode));
	}
}

/* --- attributes ------------------------------------------------------------------------------------------ */

int tmb_getattr(tmb_idmap *idmap, const struct path *path, struct kstat *stat, u32 mask, unsigned int flags)
{
	struct inode *inode = d_inode(path->dentry);
	int err = tmb_refresh(inode);

	if (err)
		return err;
	tmb_fillattr(idmap, mask, inode, stat);
	stat->blksize = TFS_BLOCK;
	stat->result_mask |= STATX_BTIME;
	stat->btime = ns_to_timespec64(tmb_i(inode)->seen.btime);
	stat->attributes_mask |= STATX_ATTR_IMMUTABLE | STATX_ATTR_APPEND;
	if (inode->i_flags & S_IMMUTABLE)
		stat->attributes |= STATX_ATTR_IMMUTABLE;
	if (inode->i_flags & S_APPEND)
		stat->attributes |= STATX_ATTR_APPEND;
	/* O_DIRECT copies as any read and write does. */
	if (mask & STATX_DIOALIGN && S_ISREG(inode->i_mode)) {
		stat->result_mask |= STATX_DIOALIGN;
		stat->dio_mem_align = 1;
		stat->dio_offset_align = 1;
	}
	return 0;
}

int tmb_permission(tmb_idmap *idmap, struct inode *inode, int mask)
{
	int err = tmb_refresh(inode);

	/* Permission to read, without an open, chdir or access(2): this is how a watch is set. */
	if (mask == MAY_READ)
		tmb_expect_watch(tmb_sb(inode->i_sb));
	return err ? err : generic_permission(idmap, inode, mask);
}

/* Changes attributes, the size first and once, by the rights that follow from 'checked'. -EAGAIN: the file has another owner or other flags by now. */
static int tmb_change_attributes(tmb_idmap *idmap, struct dentry *dentry, struct iattr *attr, const struct tfs_attr *checked)
{
	struct inode *inode = d_inode(dentry);
	struct tfs_attr a = {};
	u32 what = 0;
	int err;

	/* The VFS has checked the flags that this kernel knew, and not those of a file that is open. */
	if (IS_IMMUTABLE(inode) || (IS_APPEND(inode) && attr->ia_valid & (ATTR_SIZE | ATTR_MODE | ATTR_UID | ATTR_GID | ATTR_TIMES_SET)))
		return -EPERM;
	err = setattr_prepare(idmap, dentry, attr);
	if (err)
		return err;
	if (attr->ia_valid & ATTR_SIZE) {
		/* By the mode in the zone: the VFS used its copy, which another member may have changed since. */
		err = tmb_truncate(inode, attr->ia_size, !capable(CAP_FSETID));
		if (err)
			return err;
		attr->ia_valid &= ~ATTR_SIZE;
		tmb_tell(dentry, FS_MODIFY);
	}
	/*
	 * With ATTR_KILL_*, the mode is the VFS's copy of it without these bits, or there is none if the copy has no such bits. Another member may have
	 * changed the mode since.
	 */
	if (attr->ia_valid & (ATTR_KILL_SUID | ATTR_KILL_SGID)) {
		if (!S_ISDIR(inode->i_mode))
			what |= TFS_KILL_SET_ID;
		if (attr->ia_valid & ATTR_KILL_SGID)
			what |= TFS_KILL_SGID;
	} else if (attr->ia_valid & ATTR_MODE) {
		what |= TFS_SET_MODE;
		a.mode = attr->ia_mode;
	}
	if (attr->ia_valid & ATTR_UID) {
		what |= TFS_SET_UID;
		a.uid = from_kuid(&init_user_ns, from_vfsuid(idmap, i_user_ns(inode), attr->ia_vfsuid));
	}
	if (attr->ia_valid & ATTR_GID) {
		what |= TFS_SET_GID;
		a.gid = from_kgid(&init_user_ns, from_vfsgid(idmap, i_user_ns(inode), attr->ia_vfsgid));
	}
	if (attr->ia_valid & ATTR_ATIME) {
		what |= TFS_SET_ATIME;
		a.atime = tmb_to_ns(attr->ia_atime);
	}
	if (attr->ia_valid & ATTR_MTIME) {
		what |= TFS_SET_MTIME;
		a.mtime = tmb_to_ns(attr->ia_mtime);
	}
	if (what || attr->ia_valid & ATTR_CTIME)
		err = tfs_setattr(tmb_fs(inode), tmb_h(inode), what, &a, checked);
	if (err < 0)
		return err;
	if (what)
		tmb_tell(dentry, FS_ATTRIB);
	return tmb_refresh(inode);
}

int tmb_setattr(tmb_idmap *idmap, struct dentry *dentry, struct iattr *attr)
{
	struct iattr left = *attr;
	struct tfs_attr checked;
	unsigned int tries = 0;
	int err;

	do {
		err = tmb_refresh_to(d_inode(dentry), &checked);
		if (!err)
			err = tmb_change_attributes(idmap, dentry, &left, &checked);
	} while (tmb_check_again(&err, &tries));
	return err;
}

static int tmb_stamp(struct inode *inode, bool atime, bool mtime, bool ctime, s64 now)
{
	struct tfs_attr a = { .atime = now, .mtime = now };
	int err = 0;

	if (atime)
		err = tfs_touch_atime(tmb_fs(inode), tmb_h(inode), now);
	if (!err && (mtime || ctime))
		err = tfs_setattr(tmb_fs(inode), tmb_h(inode), mtime ? TFS_SET_MTIME : 0, &a, NULL);
	return err ? err : tmb_refresh(inode);
}

#if TMB_HAS_UPDATE_TIME_NOW
int tmb_update_time(struct inode *inode, struct timespec64 *now, int flags)
{
	return tmb_stamp(inode, flags & S_ATIME, flags & S_MTIME, flags & S_CTIME, tmb_to_ns(*now));
}
#elif TMB_HAS_UPDATE_TIME_FLAGS
int tmb_update_time(struct inode *inode, int flags)
{
	return tmb_stamp(inode, flags & S_ATIME, flags & S_MTIME, flags & S_CTIME, tfs_os_now());
}
#else
int tmb_update_time(struct inode *inode, enum fs_update_time what, unsigned int flags)
{
	if (flags & IOCB_NOWAIT)
		return -EAGAIN;
	return tmb_stamp(inode, what == FS_UPD_ATIME, what == FS_UPD_CMTIME, what == FS_UPD_CMTIME, tfs_os_now());
}
#endif

int tmb_fileattr_get(struct dentry *dentry, tmb_fileattr *fa)
{
	struct inode *inode = d_inode(dentry);
	int err = tmb_refresh(inode);

	if (err)
		return err;
	fileattr_fill_flags(fa, tmb_i(inode)->seen.flags & (TFS_FL_IMMUTABLE | TFS_FL_APPEND));
	return 0;
}

int tmb_fileattr_set(tmb_idmap *idmap, struct dentry *dentry, tmb_fileattr *fa)
{
	struct tfs_attr a = { .flags = fa->flags }, checked;
	struct inode *inode = d_inode(dentry);
	unsigned int tries = 0;
	int err;

	if (fileattr_has_fsx(fa) || fa->flags & ~(TFS_FL_IMMUTABLE | TFS_FL_APPEND))
		return -EOPNOTSUPP;
	do {
		err = tmb_refresh_to(inode, &checked);
		/* The VFS has checked the owner and the flags that this kernel knew. */
		if (!err && (!inode_owner_or_capable(idmap, inode) || (a.flags != checked.flags && !capable(CAP_LINUX_IMMUTABLE))))
			err = -EPERM;
		if (!err)
			err = tfs_setattr(tmb_fs(inode), tmb_h(inode), TFS_SET_FLAGS, &a, &checked);
	} while (tmb_check_again(&err, &tries));
	if (err)
		return err;
	tmb_tell(dentry, FS_ATTRIB);
	return tmb_refresh(inode);
}

/* --- symbolic links -------------------------------------------------------------------------------------- */

static const char *tmb_get_link(struct dentry *dentry, struct inode *inode, struct delayed_call *done)
{
	char *target;
	int n;

	if (!dentry)
		return ERR_PTR(-ECHILD);
	target = kmalloc(TFS_SYMLINK_MAX + 1, GFP_KERNEL);
	if (!target)
		return ERR_PTR(-ENOMEM);
	n = tfs_readlink(tmb_fs(inode), tmb_h(inode), target, TFS_SYMLINK_MAX);
	if (n < 0) {
		kfree(target);
		return ERR_PTR(n);
	}
	target[n] = 0;
	set_delayed_call(done, kfree_link, target);
	return target;
}

#define TMB_COMMON_OPS .getattr = tmb_getattr, .setattr = tmb_setattr, .permission = tmb_permission, \
	.listxattr = tmb_listxattr, .update_time = tmb_update_time

const struct inode_operations tmb_file_iops = {
	TMB_COMMON_OPS,
	TMB_ACL_OPS,
	.fileattr_get = tmb_fileattr_get,
	.fileattr_set = tmb_fileattr_set,
	.fiemap = tmb_fiemap,
};

const struct inode_operations tmb_symlink_iops = {
	TMB_COMMON_OPS,
	.get_link = tmb_get_link,
};

const struct inode_operations tmb_special_iops = {
	TMB_COMMON_OPS,
	TMB_ACL_OPS,
};
