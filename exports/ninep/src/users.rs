//! As whom a client acts.

use ferry_vfs::{Errno, Result};
use ferry_wire::ninep;

/// Linux's `nobody` and `nogroup`.
const NOBODY: u32 = 65534;

/// What becomes of the users that clients attach as.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Users {
    /// They are who they say. The client's kernel checks permissions, as it does for a disk: right for a client that
    /// may do anything with the source, a virtual machine for instance.
    #[default]
    Client,
    /// The same, but only these may attach.
    Only(Vec<u32>),
    /// Everybody is this user, and the server checks what that one may do.
    Squash {
        /// User id.
        uid: u32,
        /// Group id; there are no other groups.
        gid: u32,
    },
}

/// As whom a fid acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    /// The group, where a request names none.
    pub(crate) gid: u32,
    /// The server is to check permissions: the client's kernel took it for somebody else.
    pub(crate) checked: bool,
}

impl User {
    /// What it writes to loses suid and sgid.
    pub(crate) fn clears_privileges(self) -> bool {
        self.uid != 0
    }
}

impl Users {
    /// The user that a client attaches as. Linux names "nobody" without a number for the mount itself, and then
    /// attaches each user by number (`access=client`).
    pub(crate) fn resolve(&self, asked: &ninep::User<'_>) -> Result<User> {
        let uid = asked.uid.unwrap_or_else(|| named(asked.name));
        match self {
            Self::Squash { uid, gid } => Ok(User { uid: *uid, gid: *gid, checked: true }),
            Self::Only(allowed) if !allowed.contains(&uid) => Err(Errno::PERM),
            Self::Client | Self::Only(_) => Ok(User { uid, gid: if uid == 0 { 0 } else { NOBODY }, checked: false }),
        }
    }
}

/// The number of a user without a number: the client's names are not this host's, but for root's.
fn named(name: &[u8]) -> u32 {
    let number = std::str::from_utf8(name).ok().and_then(|text| text.parse().ok()).filter(|uid| *uid != u32::MAX);
    match name {
        b"root" => 0,
        _ => number.unwrap_or(NOBODY),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_taken_mapped_or_refused() {
        let squash = Users::Squash { uid: 7, gid: 8 };
        let only = Users::Only(vec![5, NOBODY]);
        let plain = |uid, gid| Ok(User { uid, gid, checked: false });
        let squashed = Ok(User { uid: 7, gid: 8, checked: true });
        for (users, name, uid, outcome) in [
            (&Users::Client, "", Some(0), plain(0, 0)),
            (&Users::Client, "root", Some(5), plain(5, NOBODY)),
            (&Users::Client, "root", None, plain(0, 0)),
            (&Users::Client, "1000", None, plain(1000, NOBODY)),
            (&Users::Client, "nobody", None, plain(NOBODY, NOBODY)),
            (&Users::Client, "4294967295", None, plain(NOBODY, NOBODY)),
            (&Users::Client, "-1", None, plain(NOBODY, NOBODY)),
            (&only, "", Some(5), plain(5, NOBODY)),
            (&only, "", Some(0), Err(Errno::PERM)),
            (&only, "root", None, Err(Errno::PERM)),
            (&squash, "root", Some(0), squashed),
            (&squash, "nobody", None, squashed),
        ] {
            let asked = ninep::User { name: name.as_bytes(), uid };
            assert_eq!(users.resolve(&asked), outcome, "{users:?}, {name:?}, {uid:?}");
        }
    }
}
