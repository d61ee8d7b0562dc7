// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * flock() and fcntl() locks, which exclude across members. The core's table in the zone decides; the VFS's own lists mirror this
 * kernel's locks, so that closing a file releases them. A lock is taken in the zone first and released in the VFS first, so what
 * the zone grants never conflicts here. A waiter sleeps until a doorbell, or a release in this kernel, and tries again.
 *
 * A release may have to wait for a suspended member. If its process is killed meanwhile, the VFS has forgotten the lock and releases it no second
 * time, so a work item of its own does it in the zone.
 */
#include "tombolo.h"

#include <linux/sched/signal.h>
#include <linux/siphash.h>

#define TMB_LOCK_WAIT_MS 1000 /* with a doorbell; the core asks for no longer */
#define TMB_LOCK_POLL_MS 20   /* without */

/* Other members may read a lock's owner, so it is not this kernel's pointer. */
static u64 tmb_owner_of(struct tmb_sb *s, const struct file_lock *fl)
{
	return siphash_1u64((unsigned long)tmb_fl(fl, owner), &s->lock_key);
}

static void tmb_describe(struct tmb_sb *s, const struct file_lock *fl, struct tfs_file_lock *lock)
{
	*lock = (struct tfs_file_lock){
		.owner = tmb_owner_of(s, fl),
		.start = fl->fl_start,
		.end = fl->fl_end == OFFSET_MAX ? ~0ull : fl->fl_end,
		.type = tmb_fl(fl, type) == F_RDLCK   ? TFS_LK_READ
			: tmb_fl(fl, type) == F_WRLCK ? TFS_LK_WRITE
						      : TFS_LK_UNLOCK,
		.kind = tmb_fl(fl, flags) & FL_FLOCK ? TFS_LK_FLOCK : TFS_LK_POSIX,
		.pid = tmb_fl(fl, pid) > 0 ? tmb_fl(fl, pid) : 0,
	};
}

static void tmb_wake_waiters(struct tmb_sb *s)
{
	atomic_inc(&s->rings);
	wake_up_all(&s->rung);
}

/* A lock that is still to be released in the zone. */
struct tmb_unlocking {
	struct list_head link;
	struct work_struct work;
	struct tmb_sb *s;
	struct tfs_handle h;
	struct tfs_file_lock lock;
};

static void tmb_unlock_late(struct work_struct *work)
{
	struct tmb_unlocking *u = container_of(work, struct tmb_unlocking, work);
	struct tmb_sb *s = u->s;

	/* An error: the file is gone, or this member, and the lock with it. */
	tfs_set_lock(&s->fs, u->h, &u->lock);
	spin_lock(&s->unlocking_lock);
	list_del(&u->link);
	spin_unlock(&s->unlocking_lock);
	kfree(u);
	tmb_wake_waiters(s);
}

/* Returns whether a lock of this owner on the file is still to be released. A new owner may have the number of one that is gone. */
static bool tmb_is_unlocking(struct tmb_sb *s, struct tfs_handle h, u64 owner)
{
	struct tmb_unlocking *u;
	bool yes = false;

	spin_lock(&s->unlocking_lock);
	list_for_each_entry(u, &s->unlocking, link)
		yes |= u->h.ino == h.ino && u->h.generation == h.generation && u->lock.owner == owner;
	spin_unlock(&s->unlocking_lock);
	return yes;
}

void tmb_locks_start(struct tmb_sb *s)
{
	spin_lock_init(&s->unlocking_lock);
	INIT_LIST_HEAD(&s->unlocking);
}

/* Releases a lock in the zone, later if the process is killed while it waits. */
static int tmb_unlock_in_zone(struct tmb_sb *s, struct inode *inode, const struct tfs_file_lock *lock)
{
	int err = tfs_set_lock(&s->fs, tmb_h(inode), lock);
	struct tmb_unlocking *u;

	if (err != -EINTR)
		return err;
	u = kmalloc(sizeof(*u), GFP_NOFS | __GFP_NOFAIL);
	INIT_WORK(&u->work, tmb_unlock_late);
	u->s = s;
	u->h = tmb_h(inode);
	u->lock = *lock;
	spin_lock(&s->unlocking_lock);
	list_add_tail(&u->link, &s->unlocking);
	spin_unlock(&s->unlocking_lock);
	queue_work(s->lock_queue, &u->work);
	return 0;
}

static int tmb_unlock(struct tmb_sb *s, struct inode *inode, struct file *file, struct file_lock *fl)
{
	struct tfs_file_lock lock;
	int err = locks_lock_file_wait(file, fl), zone_err;

	tmb_describe(s, fl, &lock);
	lock.type = TFS_LK_UNLOCK;
	zone_err = tmb_unlock_in_zone(s, inode, &lock);
	tmb_wake_waiters(s);
	return err ? err : zone_err;
}

/* Releases the VFS's copy of a flock that changes its type: the core has released it in the zone, so that its waiters go on. */
static void tmb_drop_flock(struct tmb_sb *s, struct file *file, struct file_lock *fl)
{
	struct file_lock old;

	locks_init_lock(&old);
	locks_copy_lock(&old, fl);
	tmb_fl(&old, type) = F_UNLCK;
	locks_lock_file_wait(file, &old);
	tmb_wake_waiters(s);
}

/* Takes the lock; waits if 'wait'. -EAGAIN: another owner has it. */
static int tmb_take(struct tmb_sb *s, struct file *file, struct file_lock *fl, const struct tfs_file_lock *lock, bool wait)
{
	struct inode *inode = file_inode(file);
	int seen = atomic_read(&s->rings), slot, err = tfs_set_lock(&s->fs, tmb_h(inode), lock);

	if (err == -EAGAIN && lock->kind == TFS_LK_FLOCK)
		tmb_drop_flock(s, file, fl);
	if (err != -EAGAIN || !wait)
		return err;
	slot = tfs_lock_wait_begin(&s->fs, tmb_h(inode), lock);
	if (slot < 0)
		return slot;
	for (;;) {
		bool bell = tmb_doorbell_attached(&s->doorbell) && tmb_load(&s->zone.members[s->fs.member].doorbell);
		long left;

		err = tfs_set_lock(&s->fs, tmb_h(inode), lock);
		if (err != -EAGAIN)
			break;
		left = wait_event_interruptible_timeout(s->rung, atomic_read(&s->rings) != seen,
							msecs_to_jiffies(bell ? TMB_LOCK_WAIT_MS : TMB_LOCK_POLL_MS));
		if (left < 0) {
			err = left;
			break;
		}
		seen = atomic_read(&s->rings);
		if (slot == TFS_LOCK_WAITS)
			slot = tfs_lock_wait_begin(&s->fs, tmb_h(inode), lock);
		if (slot < 0)
			return slot;
	}
	tfs_lock_wait_end(&s->fs, slot);
	return err;
}

static int tmb_set(struct file *file, struct file_lock *fl)
{
	struct inode *inode = file_inode(file);
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tfs_file_lock lock;
	int err;

	if (tmb_fl(fl, type) == F_UNLCK)
		return tmb_unlock(s, inode, file, fl);
	tmb_describe(s, fl, &lock);
	err = wait_event_interruptible(s->rung, !tmb_is_unlocking(s, tmb_h(inode), lock.owner));
	if (!err)
		err = tmb_take(s, file, fl, &lock, tmb_fl(fl, flags) & FL_SLEEP);
	if (err)
		return err == -EROFS ? -ENOLCK : err;
	err = locks_lock_file_wait(file, fl);
	if (err) {
		lock.type = TFS_LK_UNLOCK;
		tmb_unlock_in_zone(s, inode, &lock);
		tmb_wake_waiters(s);
	}
	return err;
}

static int tmb_test(struct file *file, struct file_lock *fl)
{
	struct inode *inode = file_inode(file);
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tfs_file_lock lock;
	int err;

	tmb_describe(s, fl, &lock);
	err = tfs_get_lock(&s->fs, tmb_h(inode), &lock);
	if (err)
		return err;
	if (lock.type == TFS_LK_UNLOCK) {
		tmb_fl(fl, type) = F_UNLCK;
		return 0;
	}
	tmb_fl(fl, type) = lock.type == TFS_LK_READ ? F_RDLCK : F_WRLCK;
	fl->fl_start = min_t(u64, lock.start, OFFSET_MAX);
	fl->fl_end = min_t(u64, lock.end, OFFSET_MAX);
	/* A process of another member has a negative number, as with other shared file systems. */
	tmb_fl(fl, pid) = lock.pid & INT_MAX;
	if (lock.member != s->fs.member || !lock.pid)
		tmb_fl(fl, pid) = lock.pid ? -(int)(lock.pid & INT_MAX) : -1;
	return 0;
}

int tmb_lock(struct file *file, int cmd, struct file_lock *fl)
{
	if (IS_GETLK(cmd))
		return tmb_test(file, fl);
	if (IS_SETLK(cmd) || IS_SETLKW(cmd))
		return tmb_set(file, fl);
	return -EINVAL;
}

int tmb_flock(struct file *file, int cmd, struct file_lock *fl)
{
	if (!(tmb_fl(fl, flags) & FL_FLOCK))
		return -ENOLCK;
	return tmb_set(file, fl);
}
