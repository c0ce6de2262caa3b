/* The two file systems that Ferry's are compared with, and what they have in common. */

#ifndef PEER_H
#define PEER_H

#define FUSE_USE_VERSION FUSE_MAKE_VERSION(3, 17)
#include <fuse_lowlevel.h>
#include <stdbool.h>

/* How long the kernel may believe names and attributes, in seconds: libfuse's own default, and Ferry's. */
#define TIMEOUT_S 1.0

/* Data goes between the program's pages and the server, past the page cache, and writes to a file in parallel. */
static inline void open_direct(struct fuse_file_info *fi)
{
	fi->direct_io = 1;
	fi->parallel_direct_writes = 1;
}

/* Fills in the operations. With splice, data of writes comes as a pipe; with passthrough, none comes. */
void null_operations(struct fuse_lowlevel_ops *ops, bool splice);
void memory_operations(struct fuse_lowlevel_ops *ops, bool splice, bool passes_through);

#endif
