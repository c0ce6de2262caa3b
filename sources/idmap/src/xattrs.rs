//! Maps names of extended attributes by the rules of virtiofsd's `--xattrmap`.

use std::borrow::Cow;
use std::str::FromStr;

use ferry_vfs::{Errno, Result};

/// Why a table of rules is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum XattrError {
    /// A rule has too few fields.
    #[error("the rule {0:?} of the attribute map is not whole: :TYPE:SCOPE:KEY:PREPEND:, or :map:KEY:PREPEND:")]
    Form(String),
    /// The type is unknown.
    #[error("{0:?} in the attribute map is none of prefix, ok, bad, unsupported and map")]
    Kind(String),
    /// The scope is unknown.
    #[error("{0:?} in the attribute map is none of client, server and all")]
    Scope(String),
    /// A rule follows one that ends the table.
    #[error("the rule \"map\" of the attribute map is not the last one: {0:?} follows")]
    NotLast(String),
    /// There are no rules.
    #[error("the attribute map has no rules")]
    Empty,
}

/// The effect of a rule on a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Prefix,
    Ok,
    Bad,
    Unsupported,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    kind: Kind,
    client: bool,
    server: bool,
    /// The prefix of the client's names.
    key: String,
    /// The prefix of the host's names.
    prepend: String,
}

/// A mapping of attribute names. The first matching rule decides; the default is the identity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Xattrs {
    rules: Vec<Rule>,
}

impl Xattrs {
    /// Returns whether a name maps to itself in both directions.
    pub(crate) fn is_identity(&self, name: &[u8]) -> bool {
        self.to_host(name).is_ok_and(|here| here == name) && self.to_client(name) == Some(name)
    }

    /// Returns the host's name for one of the client.
    ///
    /// # Errors
    ///
    /// `PERM` and `OPNOTSUPP` by the rules; `PERM` without a matching rule.
    pub(crate) fn to_host<'a>(&self, name: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        if self.rules.is_empty() {
            return Ok(Cow::Borrowed(name));
        }
        let rule = self.rules.iter().find(|rule| rule.client && name.starts_with(rule.key.as_bytes()));
        match rule.map(|rule| (rule.kind, rule)) {
            Some((Kind::Prefix, rule)) => Ok(Cow::Owned([rule.prepend.as_bytes(), name].concat())),
            Some((Kind::Ok, _)) => Ok(Cow::Borrowed(name)),
            Some((Kind::Unsupported, _)) => Err(Errno::OPNOTSUPP),
            Some((Kind::Bad, _)) | None => Err(Errno::PERM),
        }
    }

    /// Returns the client's name for one of the host, if it is visible.
    fn to_client<'a>(&self, name: &'a [u8]) -> Option<&'a [u8]> {
        if self.rules.is_empty() {
            return Some(name);
        }
        let rule = self.rules.iter().find(|rule| rule.server && name.starts_with(rule.prepend.as_bytes()))?;
        match rule.kind {
            Kind::Prefix => name.get(rule.prepend.len()..).filter(|rest| !rest.is_empty()),
            Kind::Ok => Some(name),
            Kind::Bad | Kind::Unsupported => None,
        }
    }

    /// Returns a list of names, each terminated by NUL, for the client.
    pub(crate) fn list_to_client(&self, names: Vec<u8>) -> Vec<u8> {
        if self.rules.is_empty() {
            return names;
        }
        let mut list = Vec::with_capacity(names.len());
        for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            if let Some(to_client) = self.to_client(name) {
                list.extend_from_slice(to_client);
                list.push(0);
            }
        }
        list
    }

    /// Returns the rules for `map`.
    fn of_map(key: &str, prepend: &str) -> Vec<Rule> {
        let rule = |kind, client, server, key: &str, prepend: &str| Rule {
            kind,
            client,
            server,
            key: key.into(),
            prepend: prepend.into(),
        };
        let prefix = rule(Kind::Prefix, true, true, key, prepend);
        if key.is_empty() {
            // Maps all names to names with the prefix, and hides others.
            return vec![prefix, rule(Kind::Bad, false, true, "", "")];
        }
        vec![
            prefix,
            // Names with the prefix are reached only without it, and host names without it are hidden.
            rule(Kind::Bad, true, false, prepend, ""),
            rule(Kind::Bad, false, true, "", key),
            rule(Kind::Ok, true, true, "", ""),
        ]
    }
}

impl FromStr for Xattrs {
    type Err = XattrError;

    fn from_str(text: &str) -> std::result::Result<Self, XattrError> {
        let mut rules = Vec::new();
        let mut rest = text.trim_start();
        while let Some(separator) = rest.chars().next() {
            let form = || XattrError::Form(rest.into());
            let body = &rest[separator.len_utf8()..];
            let (kind, body) = body.split_once(separator).ok_or_else(form)?;
            if kind == "map" {
                let (key, body) = body.split_once(separator).ok_or_else(form)?;
                let (prepend, after) = body.split_once(separator).ok_or_else(form)?;
                rules.extend(Self::of_map(key, prepend));
                let after = after.trim();
                return if after.is_empty() { Ok(Self { rules }) } else { Err(XattrError::NotLast(after.into())) };
            }
            let kind = match kind {
                "prefix" => Kind::Prefix,
                "ok" => Kind::Ok,
                "bad" => Kind::Bad,
                "unsupported" => Kind::Unsupported,
                other => return Err(XattrError::Kind(other.into())),
            };
            let (scope, body) = body.split_once(separator).ok_or_else(form)?;
            let (client, server) = match scope {
                "client" => (true, false),
                "server" => (false, true),
                "all" => (true, true),
                other => return Err(XattrError::Scope(other.into())),
            };
            let (key, body) = body.split_once(separator).ok_or_else(form)?;
            let (prepend, after) = body.split_once(separator).ok_or_else(form)?;
            rules.push(Rule { kind, client, server, key: key.into(), prepend: prepend.into() });
            rest = after.trim_start();
        }
        if rules.is_empty() { Err(XattrError::Empty) } else { Ok(Self { rules }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn map(text: &str) -> Xattrs {
        text.parse().unwrap()
    }

    fn to_host(map: &Xattrs, name: &str) -> std::result::Result<String, Errno> {
        map.to_host(name.as_bytes()).map(|name| String::from_utf8(name.into_owned()).unwrap())
    }

    fn to_client(map: &Xattrs, names: &[&str]) -> Vec<String> {
        let list = names.iter().flat_map(|name| [name.as_bytes(), b"\0"].concat()).collect();
        let list = String::from_utf8(map.list_to_client(list)).unwrap();
        list.split_terminator('\0').map(String::from).collect()
    }

    #[test]
    fn all_attributes_are_stored_below_a_prefix() {
        let map = map(":map::user.virtiofs.:");
        assert_eq!(to_host(&map, "security.selinux"), Ok("user.virtiofs.security.selinux".into()));
        let names = ["user.virtiofs.trusted.a", "user.b", "security.c", "user.virtiofs."];
        assert_eq!(to_client(&map, &names), ["trusted.a"]);
    }

    #[test]
    fn selected_attributes_are_stored_below_a_prefix() {
        let map = map("/map/trusted./user.v./");
        assert_eq!(to_host(&map, "trusted.x"), Ok("user.v.trusted.x".into()));
        assert_eq!(to_host(&map, "user.v.trusted.x"), Err(Errno::PERM));
        assert_eq!(to_host(&map, "user.a"), Ok("user.a".into()));
        assert_eq!(to_client(&map, &["user.v.trusted.x", "trusted.y", "user.a"]), ["trusted.x", "user.a"]);
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        // The second example of virtiofsd's documentation, and each kind of rule.
        let map =
            map(":prefix:all:trusted.:user.virtiofs.: :bad:all:security.:security.: !unsupported!client!user.no!! \n\
             :ok:all:::");
        assert_eq!(to_host(&map, "trusted.a"), Ok("user.virtiofs.trusted.a".into()));
        assert_eq!(to_host(&map, "security.a"), Err(Errno::PERM));
        assert_eq!(to_host(&map, "user.nothing"), Err(Errno::OPNOTSUPP));
        assert_eq!(to_host(&map, "user.a"), Ok("user.a".into()));
        let names = ["user.virtiofs.trusted.a", "security.a", "user.nothing", "user.a"];
        assert_eq!(to_client(&map, &names), ["trusted.a", "user.nothing", "user.a"]);
        let strict = self::map(":ok:all:user.:user.:");
        assert_eq!(to_host(&strict, "trusted.a"), Err(Errno::PERM));
        assert_eq!(to_client(&strict, &["trusted.a", "user.b"]), ["user.b"]);
    }

    #[test]
    fn names_that_are_the_same_are_known() {
        assert!(Xattrs::default().is_identity(b"a"));
        assert!(map(":ok:all:::").is_identity(b"a"));
        for other in [":map::user.v.:", ":bad:client:a::  :ok:all:::", ":bad:server::a: :ok:all:::"] {
            assert!(!map(other).is_identity(b"a"), "{other}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for (text, word) in [
            ("", "no rules"),
            ("  ", "no rules"),
            (":", "not whole"),
            (":ok:all:", "not whole"),
            (":ok:all::", "not whole"),
            (":map:a:", "not whole"),
            (":nice:all:::", "nice"),
            (":ok:both:::", "both"),
            (":map::a: :ok:all:::", "not the last"),
        ] {
            let error = text.parse::<Xattrs>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_rules_and_names_are_borne(text in "[:/ a-cé]{0,30}|(:(map|ok|prefix)(:all)?:[a-c]{0,2}:[a-c]{0,2}: ?){1,3}",
            name in "[a-c]{1,6}") {
            if let Ok(map) = text.parse::<Xattrs>() {
                let _ = map.to_host(name.as_bytes());
                let _ = map.list_to_client([name.as_bytes(), b"\0\0"].concat());
            }
        }

        #[test]
        fn attributes_round_trip_for_a_client(name in "[a-z]{1,5}\\.[a-z]{1,9}", key in "[a-z]{0,3}") {
            let map = map(&format!(":map:{key}:user.virtiofs.:"));
            if let Ok(here) = map.to_host(name.as_bytes()) {
                prop_assert_eq!(map.to_client(&here), Some(name.as_bytes()));
            }
        }
    }
}
