//! Delegation of the methods of [`FileSystem`](crate::FileSystem).

/// Implements methods of [`FileSystem`](crate::FileSystem) by the methods of the same name and arguments of another
/// value. A source whose code is in several modules delegates to its own inherent methods, which take precedence over
/// those of the trait.
///
/// `delegate!(self.with => ...)` runs each call in `self.with(cx, |cx| ...)`, which may change the caller. The types of
/// the methods must be in scope.
///
/// ```
/// use ferry_vfs::{Caller, Errno, FileSystem, Ino, Result};
///
/// struct Links;
///
/// impl Links {
///     fn readlink(&self, _: &Caller<'_>, ino: Ino) -> Result<Vec<u8>> {
///         if ino == Ino::ROOT { Err(Errno::INVAL) } else { Ok(b"target".into()) }
///     }
/// }
///
/// impl FileSystem for Links {
///     ferry_vfs::delegate!(self => self; readlink);
/// }
///
/// let links: &dyn FileSystem = &Links;
/// assert_eq!(links.readlink(&Caller::default(), Ino(2))?, b"target");
/// # Ok::<(), Errno>(())
/// ```
#[macro_export]
macro_rules! delegate {
    ($self:ident => $to:expr; $($method:ident),+) => { $($crate::delegate!(@$method [$self $to]);)+ };
    ($self:ident.$with:ident => $to:expr; $($method:ident),+) => { $($crate::delegate!(@$method [$self $to, $with]);)+ };
    (@fn [$self:ident $to:expr] $name:ident($($arg:ident: $type:ty),*) -> $result:ty) => {
        fn $name(&$self, cx: &Caller<'_>, $($arg: $type),*) -> $result {
            $to.$name(cx, $($arg),*)
        }
    };
    (@fn [$self:ident $to:expr, $with:ident] $name:ident($($arg:ident: $type:ty),*) -> $result:ty) => {
        fn $name(&$self, cx: &Caller<'_>, $($arg: $type),*) -> $result {
            $self.$with(cx, |cx| $to.$name(cx, $($arg),*))
        }
    };
    (@lookup $to:tt) => { $crate::delegate!(@fn $to lookup(dir: Ino, name: Name<'_>) -> Result<Entry>); };
    (@lookup_parent $to:tt) => { $crate::delegate!(@fn $to lookup_parent(dir: Ino) -> Result<Entry>); };
    (@lookup_self $to:tt) => { $crate::delegate!(@fn $to lookup_self(ino: Ino) -> Result<Entry>); };
    (@getattr $to:tt) => { $crate::delegate!(@fn $to getattr(ino: Ino, handle: Option<Handle>) -> Result<Attr>); };
    (@getattr_hint $to:tt) => { $crate::delegate!(@fn $to getattr_hint(ino: Ino, handle: Handle) -> Option<Attr>); };
    (@setattr $to:tt) => {
        $crate::delegate!(@fn $to setattr(ino: Ino, handle: Option<Handle>, set: &SetAttr) -> Result<Attr>);
    };
    (@readlink $to:tt) => { $crate::delegate!(@fn $to readlink(ino: Ino) -> Result<Vec<u8>>); };
    (@mknod $to:tt) => {
        $crate::delegate!(@fn $to mknod(dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry>);
    };
    (@mkdir $to:tt) => {
        $crate::delegate!(@fn $to mkdir(dir: Ino, name: Name<'_>, new: &CreateArgs) -> Result<Entry>);
    };
    (@symlink $to:tt) => {
        $crate::delegate!(@fn $to symlink(dir: Ino, name: Name<'_>, target: &[u8]) -> Result<Entry>);
    };
    (@link $to:tt) => { $crate::delegate!(@fn $to link(ino: Ino, dir: Ino, name: Name<'_>) -> Result<Entry>); };
    (@unlink $to:tt) => { $crate::delegate!(@fn $to unlink(dir: Ino, name: Name<'_>) -> Result<()>); };
    (@rmdir $to:tt) => { $crate::delegate!(@fn $to rmdir(dir: Ino, name: Name<'_>) -> Result<()>); };
    (@rename $to:tt) => {
        $crate::delegate!(@fn $to rename(from: (Ino, Name<'_>), to: (Ino, Name<'_>), flags: RenameFlags) -> Result<()>);
    };
    (@open $to:tt) => { $crate::delegate!(@fn $to open(ino: Ino, flags: OFlags) -> Result<Handle>); };
    (@create $to:tt) => {
        $crate::delegate!(
            @fn $to create(dir: Ino, name: Name<'_>, new: &CreateArgs, flags: OFlags) -> Result<(Entry, Handle)>
        );
    };
    (@tmpfile $to:tt) => {
        $crate::delegate!(@fn $to tmpfile(dir: Ino, new: &CreateArgs, flags: OFlags) -> Result<(Entry, Handle)>);
    };
    (@backing $to:tt) => {
        $crate::delegate!(@fn $to backing(ino: Ino, handle: Handle) -> Option<std::sync::Arc<Backing>>);
    };
    (@read $to:tt) => { $crate::delegate!(@fn $to read(at: &IoRange, out: &mut dyn Output) -> Result<Data>); };
    (@write $to:tt) => { $crate::delegate!(@fn $to write(at: &IoRange, input: &mut dyn Input) -> Result<Data>); };
    (@flush $to:tt) => { $crate::delegate!(@fn $to flush(ino: Ino, handle: Handle, owner: u64) -> Result<()>); };
    (@release $to:tt) => { $crate::delegate!(@fn $to release(ino: Ino, handle: Handle) -> ()); };
    (@fsync $to:tt) => {
        $crate::delegate!(
            @fn $to fsync(ino: Ino, handle: Handle, data_only: bool) -> Result<Option<std::sync::Arc<Backing>>>
        );
    };
    (@opendir $to:tt) => { $crate::delegate!(@fn $to opendir(ino: Ino, flags: OFlags) -> Result<Handle>); };
    (@readdir $to:tt) => { $crate::delegate!(@fn $to readdir(at: &DirRange, out: &mut dyn DirOutput) -> Result<()>); };
    (@releasedir $to:tt) => { $crate::delegate!(@fn $to releasedir(ino: Ino, handle: Handle) -> ()); };
    (@fsyncdir $to:tt) => {
        $crate::delegate!(
            @fn $to fsyncdir(ino: Ino, handle: Handle, data_only: bool) -> Result<Option<std::sync::Arc<Backing>>>
        );
    };
    (@syncfs $to:tt) => { $crate::delegate!(@fn $to syncfs(ino: Ino) -> Result<()>); };
    (@statfs $to:tt) => { $crate::delegate!(@fn $to statfs(ino: Ino) -> Result<Statfs>); };
    (@getxattr $to:tt) => { $crate::delegate!(@fn $to getxattr(ino: Ino, name: &[u8]) -> Result<Vec<u8>>); };
    (@listxattr $to:tt) => { $crate::delegate!(@fn $to listxattr(ino: Ino) -> Result<Vec<u8>>); };
    (@setxattr $to:tt) => {
        $crate::delegate!(
            @fn $to setxattr(ino: Ino, name: &[u8], value: &[u8], flags: XattrFlags, clear_sgid: bool) -> Result<()>
        );
    };
    (@removexattr $to:tt) => { $crate::delegate!(@fn $to removexattr(ino: Ino, name: &[u8]) -> Result<()>); };
    (@mode_without_acl $to:tt) => { $crate::delegate!(@fn $to mode_without_acl(ino: Ino, attr: &Attr) -> u32); };
    (@access $to:tt) => { $crate::delegate!(@fn $to access(ino: Ino, mask: u32) -> Result<()>); };
    (@get_lock $to:tt) => {
        $crate::delegate!(@fn $to get_lock(ino: Ino, handle: Handle, lock: &Lock) -> Result<Option<Lock>>);
    };
    (@set_lock $to:tt) => {
        $crate::delegate!(
            @fn $to set_lock(ino: Ino, handle: Handle, lock: &Lock, wait: Option<Waiter>) -> Result<LockOutcome>
        );
    };
    (@ioctl $to:tt) => {
        $crate::delegate!(
            @fn $to ioctl(ino: Ino, handle: Handle, command: u32, input: &[u8], out_bytes_max: usize) -> Result<Vec<u8>>
        );
    };
    (@fallocate $to:tt) => {
        $crate::delegate!(
            @fn $to fallocate(ino: Ino, handle: Handle, offset: u64, len: u64, flags: FallocateFlags) -> Result<()>
        );
    };
    (@lseek $to:tt) => {
        $crate::delegate!(@fn $to lseek(ino: Ino, handle: Handle, offset: u64, seek: Seek) -> Result<u64>);
    };
    (@copy_file_range $to:tt) => { $crate::delegate!(@fn $to copy_file_range(copy: &CopyRange) -> Result<u64>); };
}
