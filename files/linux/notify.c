// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Change events: inotify and fanotify here report other members' changes, and theirs report this kernel's.
 *
 * Telling: after an operation the VFS notifies this kernel's watchers. While another member watches, the same event goes to the zone:
 * creation, removal, renaming, changes of data and attributes, and the close of a written file. Opens and reads do not.
 *
 * Hearing: the VFS does not tell a file system that a watch is set. But setting one asks for the permission to read without opening
 * anything, so this member listens from such a question on; a worker checks now and then whether a watch remains. Events of other
 * members are looked up among the inodes that this kernel knows, since a watched inode is one of them, and passed to fsnotify. Marks on
 * a mount (FAN_MARK_MOUNT), and fanotify groups that want a descriptor with each event, hear nothing, because other members' changes happen in
 * no mount of this kernel. They can't be refused: the VFS asks no file system when they are set.
 */
#include "tombolo.h"

#include <linux/dcache.h>
#include <linux/fsnotify.h>

#define TMB_UNWATCH_MS 5000	/* how long after the last watch this member still listens, at most twice */
#define TMB_CHANGES_AT_ONCE 1000 /* then the worker does its other duties */

/* --- telling ----------------------------------------------------------------------------------------------- */

static u64 tmb_post(struct tmb_sb *s, struct tfs_change *first, struct tfs_change *second)
{
	u64 end;

	mutex_lock(&s->changes_lock);
	if (second)
		first->cookie = second->cookie = ++s->change_cookie;
	end = tfs_change_post(&s->fs, first);
	if (second)
		end = tfs_change_post(&s->fs, second);
	mutex_unlock(&s->changes_lock);
	return end;
}

static void tmb_name_change(struct tfs_change *c, const struct inode *dir, const struct qstr *name, const struct inode *inode, u32 mask)
{
	c->ino = inode->i_ino;
	c->dir = dir->i_ino;
	c->mask = mask | (S_ISDIR(inode->i_mode) ? FS_ISDIR : 0);
	c->name_len = min_t(u32, name->len, TFS_NAME_MAX);
	memcpy(c->name, name->name, c->name_len);
}

void tmb_tell_name(struct inode *dir, const struct qstr *name, struct inode *inode, u32 mask)
{
	struct tmb_sb *s = tmb_sb(dir->i_sb);
	struct tfs_change *c;

	if (!tfs_change_wanted(&s->fs))
		return;
	c = kzalloc(sizeof(*c), GFP_NOFS);
	if (!c)
		return;
	tmb_name_change(c, dir, name, inode, mask);
	tmb_post(s, c, NULL);
	kfree(c);
}

void tmb_tell_move(struct inode *old_dir, const struct qstr *old, struct inode *new_dir, const struct qstr *new, struct inode *inode)
{
	struct tmb_sb *s = tmb_sb(old_dir->i_sb);
	struct tfs_change *c;

	if (!tfs_change_wanted(&s->fs))
		return;
	c = kcalloc(2, sizeof(*c), GFP_NOFS);
	if (!c)
		return;
	tmb_name_change(&c[0], old_dir, old, inode, FS_MOVED_FROM);
	tmb_name_change(&c[1], new_dir, new, inode, FS_MOVED_TO);
	tmb_post(s, &c[0], &c[1]);
	kfree(c);
}

/* 'dentry' is the name by which it was done. */
void tmb_tell(struct dentry *dentry, u32 mask)
{
	struct inode *inode = d_inode(dentry);
	struct tmb_sb *s = tmb_sb(inode->i_sb);
	struct tmb_inode *ti = tmb_i(inode);
	struct name_snapshot name;
	struct dentry *parent;
	struct tfs_change *c;
	u64 end;

	if (!tfs_change_wanted(&s->fs))
		return;
	/* Repeated writes post one event until a watcher has read it. */
	if (mask == FS_MODIFY && tfs_change_unheard(&s->fs, READ_ONCE(ti->modify_told)))
		return;
	c = kzalloc(sizeof(*c), GFP_NOFS);
	if (!c)
		return;
	parent = dget_parent(dentry);
	take_dentry_name_snapshot(&name, dentry);
	tmb_name_change(c, d_inode(parent), &name.name, inode, mask);
	if (IS_ROOT(dentry))
		c->dir = 0; /* the root, or a file that never had a name */
	release_dentry_name_snapshot(&name);
	dput(parent);
	end = tmb_post(s, c, NULL);
	if (mask == FS_MODIFY)
		WRITE_ONCE(ti->modify_told, end);
	kfree(c);
}

void tmb_tell_inode(struct inode *inode, u32 mask)
{
	struct dentry *alias = tfs_change_wanted(tmb_fs(inode)) ? d_find_any_alias(inode) : NULL;

	if (alias)
		tmb_tell(alias, mask);
	dput(alias);
}

/* --- hearing ----------------------------------------------------------------------------------------------- */

struct tmb_number {
	u64 ino;
	bool evicted; /* an inode of this number is being evicted */
};

/* Takes a reference of the inode, unless it is being evicted or made. */
static int tmb_grab_number(struct inode *inode, tmb_hash hash, void *data)
{
	struct tmb_number *n = data;

	if (inode->i_ino != n->ino || tmb_is_new(inode))
		return 0;
	if (igrab(inode))
		return 1;
	n->evicted = true;
	return 0;
}

/*
 * Returns the inode if this kernel knows it; -ESTALE: it is being evicted. The worker does not wait for the end of that: a removed file's last user
 * may be waiting for a suspended member there.
 */
static struct inode *tmb_known(struct super_block *sb, u64 ino)
{
	struct tmb_number n = { .ino = ino };
	struct inode *inode = ino ? find_inode_nowait(sb, ino, tmb_grab_number, &n) : NULL;

	if (!inode && n.evicted)
		return ERR_PTR(-ESTALE);
	if (inode && tmb_refresh(inode) && inode->i_nlink) {
		spin_lock(&inode->i_lock);
		clear_nlink(inode);
		spin_unlock(&inode->i_lock);
	}
	return inode;
}

static bool tmb_watched(struct inode *inode)
{
	return !IS_ERR_OR_NULL(inode) && rcu_access_pointer(inode->i_fsnotify_marks);
}

/* Returns this kernel's cookie for a rename, the same for both halves. */
static u32 tmb_local_cookie(struct tmb_sb *s, const struct tfs_change *c)
{
	if (!(c->mask & (FS_MOVED_FROM | FS_MOVED_TO)))
		return 0;
	if (c->mask & FS_MOVED_FROM || s->heard_member != c->member || s->heard_cookie != c->cookie) {
		s->heard_member = c->member;
		s->heard_cookie = c->cookie;
		s->heard_as = fsnotify_get_cookie();
	}
	return s->heard_as;
}

/* Reports the change to watchers of the inode itself. */
static void tmb_hand_over_self(struct inode *inode, u32 mask)
{
	if (mask & FS_MOVED_TO)
		fsnotify_inode(inode, FS_MOVE_SELF);
	if (mask & FS_DELETE)
		fsnotify_inode(inode, FS_ATTRIB); /* its link count */
	if (mask & FS_DELETE_SELF)
		fsnotify_inoderemove(inode);
}

/* Makes an inode in place of a file that is already removed: fsnotify passes a name on only with its inode. */
static struct inode *tmb_ghost(struct super_block *sb, const struct tfs_change *c)
{
	struct inode *inode = new_inode(sb);

	if (inode) {
		inode->i_ino = c->ino;
		inode->i_mode = c->mask & FS_ISDIR ? S_IFDIR : S_IFREG;
	}
	return inode;
}

static void tmb_hand_over(struct super_block *sb, struct tfs_change *c)
{
	struct tmb_sb *s = tmb_sb(sb);
	bool all = READ_ONCE(sb->s_fsnotify_mask); /* the file system as a whole is watched */
	struct inode *dir = tmb_known(sb, c->dir), *inode = tmb_known(sb, c->ino);
	struct qstr name = QSTR_INIT(c->name, c->name_len);
	u32 cookie = tmb_local_cookie(s, c), mask = c->mask & ~FS_DELETE_SELF;

	if (all && !dir && c->dir)
		dir = tmb_iget(sb, (struct tfs_handle){ .ino = c->dir });
	if ((all || tmb_watched(dir)) && !inode && !(c->mask & FS_DELETE))
		inode = tmb_iget(sb, (struct tfs_handle){ .ino = c->ino });
	if (IS_ERR(dir))
		dir = NULL;
	if (IS_ERR(inode))
		inode = NULL;
	if (!inode && dir && (all || tmb_watched(dir)) && !(c->mask & ALL_FSNOTIFY_DIRENT_EVENTS))
		inode = tmb_ghost(sb, c);
	if (c->mask & ALL_FSNOTIFY_DIRENT_EVENTS) {
		if (dir && (all || tmb_watched(dir)))
			fsnotify(mask, inode ? inode : dir, FSNOTIFY_EVENT_INODE, dir, &name, NULL, cookie);
	} else if (inode && (all || tmb_watched(inode) || tmb_watched(dir))) {
		fsnotify(mask | (tmb_watched(dir) ? FS_EVENT_ON_CHILD : 0), inode, FSNOTIFY_EVENT_INODE, dir, dir ? &name : NULL,
			 inode, 0);
	}
	if (tmb_watched(inode))
		tmb_hand_over_self(inode, c->mask);
	iput(inode);
	iput(dir);
}

/* Some events were lost: reports a change to every watcher, so that it looks. */
static void tmb_hand_over_all(struct super_block *sb)
{
	struct inode *inode, *last = NULL;

	spin_lock(&sb->s_inode_list_lock);
	list_for_each_entry(inode, &sb->s_inodes, i_sb_list) {
		if (!tmb_watched(inode) || !igrab(inode))
			continue;
		spin_unlock(&sb->s_inode_list_lock);
		iput(last);
		fsnotify_inode(inode, FS_ATTRIB);
		last = inode;
		cond_resched();
		spin_lock(&sb->s_inode_list_lock);
	}
	spin_unlock(&sb->s_inode_list_lock);
	iput(last);
}

/* Runs in the worker, after TMB_PENDING_EVENT. True: there is more. */
bool tmb_changes_hear(struct tmb_sb *s)
{
	struct tfs_change *c = &s->heard;
	bool lost = false;
	unsigned int n;
	int ret = 1;

	if (!READ_ONCE(s->hearing))
		return false;
	for (n = 0; ret && n < TMB_CHANGES_AT_ONCE; n++) {
		ret = tfs_listen_next(&s->fs, &s->listener, c);
		if (ret == 1) {
			c->mask &= ALL_FSNOTIFY_DIRENT_EVENTS | FS_ATTRIB | FS_MODIFY | FS_CLOSE_WRITE | FS_DELETE_SELF | FS_ISDIR;
			tmb_hand_over(s->sb, c);
		}
		/* Any burst of changes does this, and the watchers are told to look: no log line. */
		lost |= ret < 0;
		cond_resched();
	}
	/* Once a round: it looks at every inode in the cache, and a hostile member can lose changes as fast as they are looked for. */
	if (lost)
		tmb_hand_over_all(s->sb);
	return ret;
}

static void tmb_forget_watches(struct work_struct *work)
{
	struct tmb_sb *s = container_of(to_delayed_work(work), struct tmb_sb, unwatch);

	mutex_lock(&s->changes_lock);
	if (!tmb_has_watchers(s->sb)) {
		WRITE_ONCE(s->hearing, false);
		tfs_listen_end(&s->fs);
	} else {
		queue_delayed_work(s->work_queue, &s->unwatch, msecs_to_jiffies(TMB_UNWATCH_MS));
	}
	mutex_unlock(&s->changes_lock);
}

/* Called when a process may be about to set a watch. */
void tmb_expect_watch(struct tmb_sb *s)
{
	if (s->fs.read_only)
		return;
	mutex_lock(&s->changes_lock);
	if (!s->hearing && !tfs_listen_begin(&s->fs, &s->listener)) {
		WRITE_ONCE(s->hearing, true);
		tmb_mappings_look(s); /* it polls while a member can't ring */
	}
	if (s->hearing)
		mod_delayed_work(s->work_queue, &s->unwatch, msecs_to_jiffies(TMB_UNWATCH_MS));
	mutex_unlock(&s->changes_lock);
}

void tmb_changes_start(struct tmb_sb *s)
{
	mutex_init(&s->changes_lock);
	INIT_DELAYED_WORK(&s->unwatch, tmb_forget_watches);
}

void tmb_changes_stop(struct tmb_sb *s)
{
	cancel_delayed_work_sync(&s->unwatch);
	WRITE_ONCE(s->hearing, false);
}
