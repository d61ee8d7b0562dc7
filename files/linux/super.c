// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Mounting: `mount -t tombolo SOURCE DIR`, SOURCE being a zone's name, its uuid, or a block device. */
#include "tombolo.h"

#include <linux/fs_context.h>
#include <linux/file.h>
#include <linux/fs_parser.h>
#include <linux/module.h>
#include <linux/random.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/statfs.h>
#include <linux/uuid.h>

static struct kmem_cache *tmb_inode_cache;

static struct inode *tmb_alloc_inode(struct super_block *sb)
{
	struct tmb_inode *ti = alloc_inode_sb(sb, tmb_inode_cache, GFP_KERNEL);

	if (!ti)
		return NULL;
	ti->generation = 0;
	memset(&ti->seen, 0, sizeof(ti->seen));
	ti->modify_told = 0;
	ti->opens = 0;
	ti->referenced = false;
	ti->own_from = 0;
	ti->own_to = 0;
	ti->mapped = false;
	ti->revoked_at = jiffies - HZ;
	ti->shows_holes = ti->told_holes = false;
	ti->pinned_at = 0;
	ti->lingers = NULL;
	tmb_pages_init(&ti->vfs);
	return &ti->vfs;
}

static void tmb_free_inode(struct inode *inode)
{
	kmem_cache_free(tmb_inode_cache, tmb_i(inode));
}

static void tmb_inode_init_once_cb(void *p)
{
	struct tmb_inode *ti = p;

	mutex_init(&ti->lock);
	mutex_init(&ti->fault_lock);
	mutex_init(&ti->map_lock);
	xa_init(&ti->runs);
	xa_init(&ti->displaced);
	xa_init(&ti->aside);
	INIT_LIST_HEAD(&ti->mapped_link);
	tmb_pages_init_once(&ti->vfs);
	inode_init_once(&ti->vfs);
}

static int tmb_statfs(struct dentry *dentry, struct kstatfs *st)
{
	struct tmb_sb *s = tmb_sb(dentry->d_sb);
	struct tfs_statfs out;

	tfs_statfs(&s->fs, &out);
	st->f_type = TMB_SUPER_MAGIC;
	st->f_bsize = TFS_BLOCK;
	st->f_frsize = TFS_BLOCK;
	st->f_blocks = out.blocks;
	st->f_bfree = out.blocks_free;
	st->f_bavail = out.blocks_free;
	st->f_files = out.inodes;
	st->f_ffree = out.inodes_free;
	st->f_namelen = TFS_NAME_MAX;
	st->f_fsid = uuid_to_fsid(s->zone.uuid);
	return 0;
}

static int tmb_show_options(struct seq_file *m, struct dentry *root)
{
	struct tmb_sb *s = tmb_sb(root->d_sb);

	seq_printf(m, ",member=%u,zone=%pU", s->fs.member, s->zone.uuid);
	return 0;
}

/* Leaves the zone and gives its device back. Does nothing the second time. */
static void tmb_leave_zone(struct super_block *sb)
{
	struct tmb_sb *s = tmb_sb(sb);

	if (!s->zone.addr)
		return;
	tmb_syncdev_destroy(s->sync);
	flush_workqueue(s->lock_queue);
	/* Path walks under RCU may still look at the zone. */
	synchronize_rcu();
	if (s->opened)
		tfs_close(&s->fs);
	if (s->joined)
		tmb_zone_leave(&s->zone, s->fs.member, s->fs.epoch);
	tmb_zone_detach(&s->zone, sb);
}

/* Runs before sget_fc() stops to find this super block, so a mount of the zone waits for its end, and finds the device free. */
static void tmb_put_super(struct super_block *sb)
{
	tmb_leave_zone(sb);
}

static const struct super_operations tmb_super_ops = {
	.put_super = tmb_put_super,
	.alloc_inode = tmb_alloc_inode,
	.free_inode = tmb_free_inode,
	/* An inode that no name or file refers to is dropped: its attributes come from the zone anyway. */
	.drop_inode = tmb_just_drop,
	.evict_inode = tmb_evict_inode,
	.statfs = tmb_statfs,
	.show_options = tmb_show_options,
};

struct tmb_options {
	int member;
	bool zone_named; /* by the option that tmb_show_options() shows, which remounts pass back */
	uuid_t zone;
	struct tmb_zone probe;
	char *path;
	struct file *memory; /* NULL: a device */
	struct file *rings, *rung; /* with memory: eventfds of a process that rings; else NULL */
	dev_t dev;
	unsigned long number;
};

static void tmb_rung(struct tmb_doorbell_client *client)
{
	struct tmb_sb *s = container_of(client, struct tmb_sb, doorbell);

	atomic_inc(&s->rings);
	wake_up_all(&s->rung);
	if (smp_load_acquire(&s->opened)) {
		tfs_rang(&s->fs);
		tmb_mappings_look(s);
	}
}

/* A failure leaves the mount without semaphores. */
static void tmb_start_sync(struct tmb_sb *s)
{
	const struct tmb_syncdev_config config = {
		.zone_uuid = s->zone.uuid,
		.zone_name = s->zone.name,
		.area = s->zone.addr + s->zone.sync_offset,
		.pfn = s->zone.pfn + PHYS_PFN(s->zone.sync_offset),
		.length = s->zone.sync_length,
		.members = s->zone.members,
		.member = s->fs.member,
		.epoch = s->fs.epoch,
	};

	s->sync = tmb_syncdev_create(&config);
	if (IS_ERR(s->sync)) {
		pr_warn("tombolo: zone %s: no semaphores for processes here (%ld)\n", s->zone.name, PTR_ERR(s->sync));
		s->sync = NULL;
	}
}

static int tmb_fill_super(struct super_block *sb, struct fs_context *fc)
{
	struct tmb_options *o = fc->fs_private;
	struct tmb_sb *s = tmb_sb(sb);
	struct inode *root;
	u32 member, epoch;
	bool writable;
	int err;

	sb->s_magic = TMB_SUPER_MAGIC;
	sb->s_blocksize = TFS_BLOCK;
	sb->s_blocksize_bits = TFS_BLOCK_SHIFT;
	sb->s_maxbytes = TFS_MAX_SIZE;
	sb->s_max_links = TFS_LINK_MAX;
	sb->s_time_gran = 1;
	sb->s_time_min = div_s64(S64_MIN, NSEC_PER_SEC) + 1;
	sb->s_time_max = div_s64(S64_MAX, NSEC_PER_SEC) - 1;
	sb->s_op = &tmb_super_ops;
	tmb_set_d_op(sb, &tmb_dentry_ops);
	sb->s_xattr = (void *)tmb_xattr_handlers;
	sb->s_flags |= SB_POSIXACL;

	err = o->memory ? tmb_zone_attach_memory(&s->zone, o->memory) : tmb_zone_attach(&s->zone, o->path, sb);
	if (err) {
		errorf(fc, "tombolo: %s: cannot attach the zone (%d)", o->memory ? "memory" : o->path, err);
		return err;
	}
	memcpy(s->doorbell.zone_uuid, s->zone.uuid, sizeof(s->zone.uuid));
	s->doorbell.look = tmb_rung;
	tmb_doorbell_register(&s->doorbell);
	s->listening = true;
	err = o->rings && o->rung ? tmb_doorbell_by_process(&s->doorbell, o->rings, o->rung) : 0;
	if (err) {
		errorf(fc, "tombolo: rings and rung are descriptors of eventfds (%d)", err);
		return err;
	}
	err = tmb_zone_join(&s->zone, o->member, tmb_doorbell_self(&s->doorbell), sb->s_flags & SB_RDONLY, &member, &epoch,
			    &s->may_write, &s->joined);
	if (err) {
		if (o->member >= 0)
			errorf(fc, "tombolo: zone %s keeps no slot %d for this VM: invite it on the host", s->zone.name,
			       o->member);
		else
			errorf(fc, "tombolo: zone %s has no slot left for a VM: invite this VM on the host", s->zone.name);
		return err;
	}
	s->fs.member = member;
	s->fs.epoch = epoch;
	s->fs.os = s;
	/* Without a slot of its own it stores nothing. */
	writable = s->joined;
	s->fs.read_only = !writable;
	if (!writable)
		sb->s_flags |= SB_RDONLY;
	err = tfs_open(&s->fs, s->zone.addr + s->zone.files_offset, s->zone.files_length, s->zone.members, member, epoch);
	if (err == -EINVAL)
		errorf(fc, "tombolo: zone %s has no file system: run `tombolo files mkfs` on the host", s->zone.name);
	else if (err == -EPROTONOSUPPORT)
		errorf(fc, "tombolo: zone %s: its file system is of another version than this module: install the host's tombolo-dkms here",
		       s->zone.name);
	else if (err)
		errorf(fc, "tombolo: zone %s: its file system is damaged (%d): run `tombolo files fsck` on the host",
		       s->zone.name, err);
	if (err)
		return err;
	if (s->fs.root.ino == TFS_ROOT_INO)
		sb->s_export_op = &tmb_export_ops;
	tmb_mappings_start(s);
	smp_store_release(&s->opened, true);
	if (writable) {
		err = tfs_recover_all(&s->fs);
		if (err)
			pr_warn("tombolo: zone %s: the recovery of dead members failed (%d)\n", s->zone.name, err);
	}

	if (writable && s->zone.sync_length && !s->zone.frames) /* on the host, processes have semaphores by the zone's file */
		tmb_start_sync(s);
	root = tmb_iget(sb, s->fs.root);
	if (!IS_ERR(root) && !S_ISDIR(root->i_mode)) {
		iput(root);
		tfs_os_damage(&s->fs, "the root is no directory", s->fs.root.ino, 0);
		return -EUCLEAN;
	}
	if (IS_ERR(root) && s->fs.root.ino != TFS_ROOT_INO)
		errorf(fc, "tombolo: zone %s: the directory that this VM is confined to is gone: make it, and grant it again on the host",
		       s->zone.name);
	if (IS_ERR(root))
		return PTR_ERR(root);
	sb->s_root = d_make_root(root);
	if (!sb->s_root)
		return -ENOMEM;
	return 0;
}

static int tmb_same_zone(struct super_block *sb, struct fs_context *fc)
{
	struct tmb_options *o = fc->fs_private;

	return tmb_sb(sb)->dev == o->dev && tmb_sb(sb)->number == o->number;
}

static int tmb_set_zone(struct super_block *sb, struct fs_context *fc)
{
	return set_anon_super(sb, NULL);
}

static void tmb_free_sb(struct tmb_sb *s)
{
	if (s->work_queue)
		destroy_workqueue(s->work_queue);
	if (s->lock_queue)
		destroy_workqueue(s->lock_queue);
	kfree(s);
}

/* Finds the device of the zone that the mount names. */
static int tmb_find_device(struct fs_context *fc)
{
	struct tmb_options *o = fc->fs_private;
	int err;

	if (!fc->source)
		return invalf(fc, "tombolo: name a zone, its uuid or its block device");
	kfree(o->path);
	o->path = NULL;
	err = tmb_zone_find(fc->source, &o->probe, &o->path);
	if (!err && !o->probe.files_length) {
		kfree(o->path);
		err = -ENODATA;
	}
	if (err) {
		o->path = NULL;
		if (err == -EPROTONOSUPPORT)
			errorf(fc, "tombolo: %s: a zone of another version than this module: install the host's tombolo-dkms here", fc->source);
		else if (err == -ENODATA)
			errorf(fc, "tombolo: %s: the zone has no area for files: run `tombolo files mkfs` on the host", fc->source);
		else if (err == -EUCLEAN)
			errorf(fc, "tombolo: %s: the zone's header is damaged", fc->source);
		else
			errorf(fc, "tombolo: %s: no such zone among /dev/pmem* (is it attached to this VM?)", fc->source);
		return err;
	}
	err = lookup_bdev(o->path, &o->dev);
	if (err)
		return err;
	if (o->zone_named && memcmp(o->zone.b, o->probe.uuid, sizeof(o->probe.uuid)))
		return invalf(fc, "tombolo: %s is zone %pU, not zone=%pU", fc->source, o->probe.uuid, &o->zone);
	return 0;
}

static int tmb_get_tree(struct fs_context *fc)
{
	struct tmb_options *o = fc->fs_private;
	struct super_block *sb;
	struct tmb_sb *s;
	int err;

	if (o->memory) {
		o->dev = file_inode(o->memory)->i_sb->s_dev;
		o->number = file_inode(o->memory)->i_ino;
	} else {
		err = tmb_find_device(fc);
		if (err)
			return err;
	}
	s = kzalloc(sizeof(*s), GFP_KERNEL);
	if (!s)
		return -ENOMEM;
	s->dev = o->dev;
	s->number = o->number;
	init_waitqueue_head(&s->rung);
	get_random_bytes(&s->lock_key, sizeof(s->lock_key));
	spin_lock_init(&s->mapped_lock);
	INIT_LIST_HEAD(&s->mapped);
	tmb_changes_start(s);
	tmb_closing_start(s);
	tmb_locks_start(s);
	s->work_queue = alloc_ordered_workqueue("tombolo", WQ_MEM_RECLAIM);
	s->lock_queue = alloc_workqueue("tombolo-locks", WQ_UNBOUND, 0);
	if (!s->work_queue || !s->lock_queue) {
		tmb_free_sb(s);
		return -ENOMEM;
	}
	fc->s_fs_info = s;
	sb = sget_fc(fc, tmb_same_zone, tmb_set_zone);
	if (fc->s_fs_info) { /* not taken over by a new super block */
		tmb_free_sb(s);
		fc->s_fs_info = NULL;
	}
	if (IS_ERR(sb))
		return PTR_ERR(sb);
	if (!sb->s_root) {
		tmb_sb(sb)->sb = sb;
		err = tmb_fill_super(sb, fc);
		if (err) {
			deactivate_locked_super(sb);
			return err;
		}
		sb->s_flags |= SB_ACTIVE;
	} else if ((fc->sb_flags ^ sb->s_flags) & SB_RDONLY && !(fc->sb_flags & SB_RDONLY) && tmb_sb(sb)->fs.read_only) {
		if (tmb_sb(sb)->may_write) {
			errorf(fc, "tombolo: zone %s is mounted read-only: unmount it there first", tmb_sb(sb)->zone.name);
			deactivate_locked_super(sb);
			return -EBUSY;
		}
		/* A second mount of a read-only membership is read-only as well. */
		fc->sb_flags |= SB_RDONLY;
	}
	fc->root = dget(sb->s_root);
	return 0;
}

static void tmb_kill_sb(struct super_block *sb)
{
	struct tmb_sb *s = tmb_sb(sb);

	if (s) { /* the worker may hold an inode */
		WRITE_ONCE(s->ending, true);
		if (s->listening)
			tmb_doorbell_unregister(&s->doorbell);
		s->listening = false;
		tmb_mappings_stop(s);
		tmb_changes_stop(s);
	}
	/* A mount that failed has no root, so tmb_put_super() is not called. This is as early. */
	if (s && !sb->s_root)
		tmb_leave_zone(sb);
	kill_anon_super(sb);
	if (s)
		tmb_free_sb(s);
}

enum { TMB_OPT_MEMBER, TMB_OPT_ZONE, TMB_OPT_MEMORY, TMB_OPT_RINGS, TMB_OPT_RUNG };
static const struct fs_parameter_spec tmb_params[] = {
	fsparam_u32("member", TMB_OPT_MEMBER),
	fsparam_string("zone", TMB_OPT_ZONE),
	fsparam_fd("memory", TMB_OPT_MEMORY),
	fsparam_fd("rings", TMB_OPT_RINGS),
	fsparam_fd("rung", TMB_OPT_RUNG),
	{},
};

static int tmb_parse_param(struct fs_context *fc, struct fs_parameter *param)
{
	struct tmb_options *o = fc->fs_private;
	struct file **file = NULL;
	struct fs_parse_result result;
	int opt = fs_parse(fc, tmb_params, param, &result);

	if (opt < 0)
		return opt;
	if (opt == TMB_OPT_ZONE) {
		if (uuid_parse(param->string, &o->zone))
			return invalf(fc, "tombolo: zone=%s: no uuid", param->string);
		o->zone_named = true;
		return 0;
	}
	if (opt == TMB_OPT_MEMORY)
		file = &o->memory;
	else if (opt == TMB_OPT_RINGS)
		file = &o->rings;
	else if (opt == TMB_OPT_RUNG)
		file = &o->rung;
	if (file) {
		if (*file)
			return invalf(fc, "tombolo: %s is given twice", param->key);
		*file = param->type == fs_value_is_file ? get_file(param->file) : fget(result.uint_32);
		return *file ? 0 : -EBADF;
	}
	if (result.uint_32 >= TMB_MAX_MEMBERS)
		return invalf(fc, "tombolo: member=%u: a zone has members 0 to %u", result.uint_32, TMB_MAX_MEMBERS - 1);
	o->member = result.uint_32;
	return 0;
}

static int tmb_reconfigure(struct fs_context *fc)
{
	struct tmb_sb *s = tmb_sb(fc->root->d_sb);
	struct tmb_options *o = fc->fs_private;

	/* mount(8) and busybox pass the options back that /proc/mounts shows. */
	if ((o->member >= 0 && o->member != s->fs.member) || (o->zone_named && memcmp(o->zone.b, s->zone.uuid, sizeof(s->zone.uuid))))
		return invalf(fc, "tombolo: zone %s: a remount can't change the zone or the member: unmount it first", s->zone.name);
	if (s->fs.read_only && s->may_write && !(fc->sb_flags & SB_RDONLY) && fc->sb_flags_mask & SB_RDONLY)
		return invalf(fc, "tombolo: zone %s was mounted without taking part in it: unmount it, and mount it for writing", s->zone.name);
	if (s->fs.read_only && !(fc->sb_flags & SB_RDONLY) && fc->sb_flags_mask & SB_RDONLY)
		return invalf(fc, "tombolo: the host gave this VM no right to write to zone %s", s->zone.name);
	return 0;
}

static void tmb_free_fc(struct fs_context *fc)
{
	struct tmb_options *o = fc->fs_private;

	if (o) {
		if (o->memory)
			fput(o->memory);
		if (o->rings)
			fput(o->rings);
		if (o->rung)
			fput(o->rung);
		kfree(o->path);
		kfree(o);
	}
}

static const struct fs_context_operations tmb_context_ops = {
	.free = tmb_free_fc,
	.parse_param = tmb_parse_param,
	.get_tree = tmb_get_tree,
	.reconfigure = tmb_reconfigure,
};

static int tmb_init_fs_context(struct fs_context *fc)
{
	struct tmb_options *o = kzalloc(sizeof(*o), GFP_KERNEL);

	if (!o)
		return -ENOMEM;
	o->member = -1;
	fc->fs_private = o;
	fc->ops = &tmb_context_ops;
	return 0;
}

static struct file_system_type tmb_type = {
	.owner = THIS_MODULE,
	.name = "tombolo",
	.init_fs_context = tmb_init_fs_context,
	.parameters = tmb_params,
	.kill_sb = tmb_kill_sb,
	.fs_flags = FS_ALLOW_IDMAP,
};
MODULE_ALIAS_FS("tombolo");

static int __init tmb_init(void)
{
	int err;

	tmb_inode_cache = kmem_cache_create("tombolo_inode", sizeof(struct tmb_inode), 0,
					    SLAB_RECLAIM_ACCOUNT | SLAB_ACCOUNT, tmb_inode_init_once_cb);
	if (!tmb_inode_cache)
		return -ENOMEM;
	err = tmb_mappings_init();
	if (err)
		goto cache;
	err = tmb_doorbell_init();
	if (err)
		goto mappings;
	err = tmb_hibernate_init();
	if (err)
		goto doorbell;
	err = register_filesystem(&tmb_type);
	if (err)
		goto hibernate;
	return 0;
hibernate:
	tmb_hibernate_exit();
doorbell:
	tmb_doorbell_exit();
mappings:
	tmb_mappings_exit();
cache:
	kmem_cache_destroy(tmb_inode_cache);
	return err;
}

static void __exit tmb_exit(void)
{
	unregister_filesystem(&tmb_type);
	tmb_mappings_exit();
	tmb_calls_exit();
	tmb_hibernate_exit();
	tmb_doorbell_exit();
	rcu_barrier(); /* inodes are freed after a grace period */
	kmem_cache_destroy(tmb_inode_cache);
}

module_init(tmb_init);
module_exit(tmb_exit);
MODULE_DESCRIPTION("Tombolo: one file system in memory shared by virtual machines");
MODULE_LICENSE("Dual BSD/GPL");
