//! The user that a client acts as.

use ferry_vfs::{Errno, Result};
use ferry_wire::ninep;

/// Linux's ids of `nobody` and `nogroup`.
const NOBODY: u32 = 65534;

/// The handling of the users that clients attach as.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Users {
    /// Users are trusted. The client's kernel checks permissions, as for a disk: right for a client with full access to
    /// the source, such as a virtual machine.
    #[default]
    Client,
    /// Only these users may attach, and the server checks them as local processes: root may do anything.
    Only(Vec<Identity>),
    /// All clients are this user, whose permissions the server checks.
    Squash {
        /// User id.
        uid: u32,
        /// Group id; there are no other groups.
        gid: u32,
    },
}

/// A user of this host, with its groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// User id.
    pub uid: u32,
    /// The group of created files if a client names none of the user's groups.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// The user that a fid acts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    /// The group, where a request names none.
    pub(crate) gid: u32,
    /// Returns whether the server checks permissions: the client's kernel knows another user, or is not trusted.
    pub(crate) checked: bool,
}

impl User {
    /// Whether the server has permissions to check: root may do anything.
    pub(crate) fn is_bound(self) -> bool {
        self.checked && self.uid != 0
    }

    /// Whether its writes clear suid and sgid.
    pub(crate) fn clears_privileges(self) -> bool {
        self.uid != 0
    }
}

impl Users {
    /// Returns the user that a client attaches as. Linux sends "nobody" without a number for the mount itself.
    pub(crate) fn resolve(&self, asked: &ninep::User<'_>) -> Result<User> {
        let uid = asked.uid.unwrap_or_else(|| named(asked.name));
        match self {
            Self::Squash { uid, gid } => Ok(User { uid: *uid, gid: *gid, checked: true }),
            Self::Only(allowed) => {
                let found = allowed.iter().find(|identity| identity.uid == uid).ok_or(Errno::PERM)?;
                Ok(User { uid, gid: found.gid, checked: uid != 0 })
            }
            Self::Client => Ok(User { uid, gid: if uid == 0 { 0 } else { NOBODY }, checked: false }),
        }
    }

    /// Returns the supplementary groups of a user.
    pub(crate) fn groups(&self, user: User) -> &[u32] {
        match self {
            Self::Only(allowed) => {
                let found = allowed.iter().find(|identity| identity.uid == user.uid);
                found.map_or(&[], |identity| &identity.groups)
            }
            Self::Client | Self::Squash { .. } => &[],
        }
    }

    /// Returns the users whose permissions the server checks.
    pub(crate) fn bound(&self) -> impl Iterator<Item = User> {
        let (only, squash) = match self {
            Self::Client => (&[][..], None),
            Self::Only(allowed) => (&allowed[..], None),
            Self::Squash { uid, gid } => (&[][..], Some((*uid, *gid))),
        };
        let only = only.iter().map(|identity| (identity.uid, identity.gid));
        only.chain(squash).map(|(uid, gid)| User { uid, gid, checked: true }).filter(|user| user.is_bound())
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
        let identity = |uid, gid| Identity { uid, gid, groups: vec![gid + 1] };
        let only = Users::Only(vec![identity(5, 50), identity(0, 0), identity(NOBODY, NOBODY)]);
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
            (&only, "", Some(5), Ok(User { uid: 5, gid: 50, checked: true })),
            (&only, "nobody", None, Ok(User { uid: NOBODY, gid: NOBODY, checked: true })),
            (&only, "", Some(0), plain(0, 0)),
            (&only, "root", None, plain(0, 0)),
            (&only, "", Some(6), Err(Errno::PERM)),
            (&only, "6", None, Err(Errno::PERM)),
            (&squash, "root", Some(0), squashed),
            (&squash, "nobody", None, squashed),
        ] {
            let asked = ninep::User { name: name.as_bytes(), uid };
            assert_eq!(users.resolve(&asked), outcome, "{users:?}, {name:?}, {uid:?}");
        }
        let bound =
            |users: &Users| users.bound().map(|user| (user.uid, users.groups(user).to_vec())).collect::<Vec<_>>();
        assert_eq!(bound(&Users::Client), []);
        assert_eq!(bound(&Users::Squash { uid: 0, gid: 5 }), []);
        assert_eq!(bound(&squash), [(7, vec![])]);
        assert_eq!(bound(&only), [(5, vec![51]), (NOBODY, vec![NOBODY + 1])]);
    }
}
