/*
 * The null file system: any name in its one directory is a file, writes go nowhere, reads give zeros. What remains is
 * the cost of the way there and back.
 */

#include "peer.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

/* The size of every file: what the harness asks fio to work on, and as large in Ferry's null file system. */
#define FILE_BYTES (32 << 20)

/* The largest read that the kernel sends: 256 pages. */
static const char zeros[1 << 20];

static void attributes(fuse_ino_t ino, struct stat *stat)
{
	memset(stat, 0, sizeof(*stat));
	stat->st_ino = ino;
	stat->st_nlink = 1;
	stat->st_mode = ino == FUSE_ROOT_ID ? S_IFDIR | 0755 : S_IFREG | 0644;
	stat->st_size = ino == FUSE_ROOT_ID ? 0 : FILE_BYTES;
}

/* The same name is always the same inode: FNV-1a, with a bit that keeps it off the root's number. */
static fuse_ino_t number(const char *name)
{
	uint64_t hash = 0xcbf29ce484222325;

	for (; *name; name++)
		hash = (hash ^ (unsigned char)*name) * 0x100000001b3;
	return hash | 2;
}

static void entry(const char *name, struct fuse_entry_param *param)
{
	memset(param, 0, sizeof(*param));
	param->ino = number(name);
	param->attr_timeout = TIMEOUT_S;
	param->entry_timeout = TIMEOUT_S;
	attributes(param->ino, &param->attr);
}

static void null_lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	struct fuse_entry_param param;

	(void)parent;
	entry(name, &param);
	fuse_reply_entry(req, &param);
}

static void null_getattr(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	struct stat stat;

	(void)fi;
	attributes(ino, &stat);
	fuse_reply_attr(req, &stat, TIMEOUT_S);
}

static void null_setattr(fuse_req_t req, fuse_ino_t ino, struct stat *stat, int mask, struct fuse_file_info *fi)
{
	(void)stat;
	(void)mask;
	null_getattr(req, ino, fi);
}

static void null_open(fuse_req_t req, fuse_ino_t ino, struct fuse_file_info *fi)
{
	(void)ino;
	open_direct(fi);
	fuse_reply_open(req, fi);
}

static void null_read(fuse_req_t req, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info *fi)
{
	size_t left = offset < FILE_BYTES ? (size_t)(FILE_BYTES - offset) : 0;

	(void)ino;
	(void)fi;
	if (size > left)
		size = left;
	fuse_reply_buf(req, zeros, size < sizeof(zeros) ? size : sizeof(zeros));
}

static void null_write(fuse_req_t req, fuse_ino_t ino, const char *bytes, size_t size, off_t offset,
		       struct fuse_file_info *fi)
{
	(void)ino;
	(void)bytes;
	(void)offset;
	(void)fi;
	fuse_reply_write(req, size);
}

/* What lies in the pipe is thrown away unread: by libfuse, with the pipe. */
static void null_write_buf(fuse_req_t req, fuse_ino_t ino, struct fuse_bufvec *from, off_t offset,
			   struct fuse_file_info *fi)
{
	(void)ino;
	(void)offset;
	(void)fi;
	fuse_reply_write(req, fuse_buf_size(from));
}

static void null_fsync(fuse_req_t req, fuse_ino_t ino, int datasync, struct fuse_file_info *fi)
{
	(void)ino;
	(void)datasync;
	(void)fi;
	fuse_reply_err(req, 0);
}

void null_operations(struct fuse_lowlevel_ops *ops, bool splice)
{
	ops->lookup = null_lookup;
	ops->getattr = null_getattr;
	ops->setattr = null_setattr;
	ops->open = null_open;
	ops->read = null_read;
	if (splice)
		ops->write_buf = null_write_buf;
	else
		ops->write = null_write;
	ops->fsync = null_fsync;
}
