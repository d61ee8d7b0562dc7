// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Extended attributes: user., trusted. and security. go to the core under their full names. */
#include "tombolo.h"

#include <linux/capability.h>
#include <linux/slab.h>
#include <linux/xattr.h>

#include <linux/posix_acl_xattr.h>

static int tmb_get(const struct xattr_handler *handler, struct dentry *dentry, struct inode *inode, const char *name, void *buffer,
		   size_t size)
{
	/* security.capability is asked for at every write: spare the walk. */
	if (!READ_ONCE(tmb_i(inode)->seen.has_xattr)) {
		int err = tmb_refresh(inode);

		if (err)
			return err;
		if (!READ_ONCE(tmb_i(inode)->seen.has_xattr))
			return -ENODATA;
	}
	return tfs_xattr_get(tmb_fs(inode), tmb_h(inode), xattr_full_name(handler, name), buffer, size);
}

static const struct xattr_handler tmb_security_handler;

static int tmb_set(const struct xattr_handler *handler, tmb_idmap *idmap, struct dentry *dentry, struct inode *inode,
		   const char *name, const void *value, size_t size, int flags)
{
	u32 how = 0;
	int err;

	if (flags & XATTR_CREATE)
		how |= TFS_XATTR_CREATE;
	if (flags & XATTR_REPLACE)
		how |= TFS_XATTR_REPLACE;
	err = tmb_refresh(inode);
	if (err)
		return err;
	/* The VFS has checked the flags that this kernel knew. What is written to an append-only file removes its capabilities. */
	if (IS_IMMUTABLE(inode) || (IS_APPEND(inode) && (value || handler != &tmb_security_handler)))
		return -EPERM;
	err = tfs_xattr_set(tmb_fs(inode), tmb_h(inode), xattr_full_name(handler, name), value, size, how, -1, NULL, tfs_os_now());
	if (err)
		return err;
	tmb_tell(dentry, FS_ATTRIB);
	return tmb_refresh(inode);
}

static const struct xattr_handler tmb_user_handler = { .prefix = XATTR_USER_PREFIX, .get = tmb_get, .set = tmb_set };
static const struct xattr_handler tmb_trusted_handler = { .prefix = XATTR_TRUSTED_PREFIX, .get = tmb_get, .set = tmb_set };
static const struct xattr_handler tmb_security_handler = { .prefix = XATTR_SECURITY_PREFIX, .get = tmb_get, .set = tmb_set };

const struct xattr_handler *const tmb_xattr_handlers[] = {
	&tmb_user_handler,
	&tmb_trusted_handler,
	&tmb_security_handler,
#if !TMB_HAS_ACL_BY_DENTRY /* later kernels go to the ACL operations directly */
	&posix_acl_access_xattr_handler,
	&posix_acl_default_xattr_handler,
#endif
	NULL,
};

/* The core lists all names; "trusted." is hidden from processes without CAP_SYS_ADMIN. */
ssize_t tmb_listxattr(struct dentry *dentry, char *list, size_t size)
{
	struct inode *inode = d_inode(dentry);
	char *names, *name;
	ssize_t length, used = 0;

	names = kvmalloc(TFS_XATTR_MAX, GFP_KERNEL);
	if (!names)
		return -ENOMEM;
	length = tfs_xattr_list(tmb_fs(inode), tmb_h(inode), names, TFS_XATTR_MAX);
	for (name = names; length > 0 && name < names + length;) {
		size_t n = strnlen(name, names + length - name) + 1;

		if (n > names + length - name)
			break; /* not terminated: the core never gives such a list */
		if (strncmp(name, XATTR_TRUSTED_PREFIX, XATTR_TRUSTED_PREFIX_LEN) || capable(CAP_SYS_ADMIN)) {
			if (size && used + n > size) {
				used = -ERANGE;
				break;
			}
			if (size)
				memcpy(list + used, name, n);
			used += n;
		}
		name += n;
	}
	kvfree(names);
	return length < 0 ? length : used;
}
