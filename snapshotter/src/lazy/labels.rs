//! The labels by which containerd names the layer and image of a requested snapshot. CRI and the transfer service set the `cri` labels;
//! clients for eStargz set the others.

use crate::api::Labels;

/// The name of the committed snapshot.
pub const TARGET: &str = "containerd.io/snapshot.ref";
/// The reference of the image, per setter.
const REFERENCES: [&str; 2] =
    ["containerd.io/snapshot/cri.image-ref", "containerd.io/snapshot/remote/stargz.reference"];
/// The digest of its manifest.
const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";
/// The digest of the layer's blob.
const DIGESTS: [&str; 2] = ["containerd.io/snapshot/cri.layer-digest", "containerd.io/snapshot/remote/stargz.digest"];
/// The digests of this layer and those above it, as many as a label has room for.
const LAYERS: [&str; 2] = ["containerd.io/snapshot/cri.image-layers", "containerd.io/snapshot/remote/stargz.layers"];
/// The digest of the layer's table of contents, an annotation of the manifest.
const TABLE: &str = "containerd.io/snapshot/stargz/toc.digest";

/// A request for a snapshot of a layer in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The name of the committed snapshot.
    pub target: String,
    /// The registry and the repository: `HOST/NAME`.
    pub repository: String,
    /// The manifest, or an index with it: `oci:HOST/NAME:TAG`, or by its digest.
    pub reference: String,
    /// The digests of the layer and of those above it, as far as they are known.
    pub layers: Vec<String>,
    /// The digest of the layer's table of contents.
    pub table: Option<String>,
}

impl Request {
    /// Parses labels, if they name a layer of an image.
    #[must_use]
    pub fn of(labels: &Labels) -> Option<Self> {
        let get = |name: &str| labels.get(name).filter(|value| !value.is_empty());
        let first = |names: [&str; 2]| names.iter().find_map(|name| get(name));
        let (target, reference, digest) = (get(TARGET)?, first(REFERENCES)?, first(DIGESTS)?);
        let (name, by_digest) = match reference.split_once('@') {
            Some((name, digest)) => (name, Some(digest)),
            None => (reference.as_str(), None),
        };
        let (repository, tag) = split_tag(name);
        let (repository, tag) = (repository.to_owned(), tag.unwrap_or("latest"));
        repository.contains('/').then_some(())?;
        let reference = match get(MANIFEST).map(String::as_str).or(by_digest) {
            Some(digest) => format!("oci:{repository}@{digest}"),
            None => format!("oci:{repository}:{tag}"),
        };
        let above = first(LAYERS).map(|layers| layers.split(',').map(str::to_owned).collect::<Vec<_>>());
        let mut layers = above.unwrap_or_default();
        if layers.first() != Some(digest) {
            layers = vec![digest.clone()];
        }
        Some(Self { target: target.clone(), repository, reference, layers, table: get(TABLE).cloned() })
    }
}

/// Splits a name from its tag. A colon in the host is one of a port.
pub(super) fn split_tag(name: &str) -> (&str, Option<&str>) {
    let last = name.rfind('/').map_or(0, |slash| slash + 1);
    match name[last..].find(':') {
        Some(colon) => (&name[..last + colon], Some(&name[last + colon + 1..])),
        None => (name, None),
    }
}

/// Returns the registry and the repository of a reference of a pod, in which those of Docker Hub may be left out.
#[must_use]
pub fn repository_of(image: &str) -> Option<String> {
    let (name, _) = split_tag(image.split('@').next().unwrap_or_default());
    let is_host = |first: &str| first.contains(['.', ':']) || first == "localhost";
    match name.split_once('/') {
        _ if name.is_empty() => None,
        Some((first, rest)) if is_host(first) => {
            let is_hub = matches!(first, "index.docker.io" | "registry-1.docker.io");
            Some(if is_hub { format!("docker.io/{rest}") } else { name.to_owned() })
        }
        Some(_) => Some(format!("docker.io/{name}")),
        None => Some(format!("docker.io/library/{name}")),
    }
}

/// Whether a list of registries and repositories contains a repository.
#[must_use]
pub fn includes(list: &[String], repository: &str) -> bool {
    list.iter().any(|entry| {
        entry == "*" || repository.strip_prefix(&**entry).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn labels(all: &[(&str, &str)]) -> Labels {
        all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn labels_of_cri_and_of_stargz_are_read() {
        let target = (TARGET, "sha256:chain");
        let cri = |reference: &'static str, more: &[(&'static str, &'static str)]| {
            let mut all = vec![target, (REFERENCES[0], reference), (DIGESTS[0], "sha256:a")];
            all.extend(more);
            Request::of(&labels(&all))
        };
        for (reference, more, repository, expected) in [
            ("docker.io/library/debian:12", &[][..], "docker.io/library/debian", "oci:docker.io/library/debian:12"),
            ("h:5000/a/b", &[], "h:5000/a/b", "oci:h:5000/a/b:latest"),
            ("h:5000/a/b@sha256:m", &[], "h:5000/a/b", "oci:h:5000/a/b@sha256:m"),
            ("h/a:1@sha256:index", &[(MANIFEST, "sha256:m")], "h/a", "oci:h/a@sha256:m"),
        ] {
            let found = cri(reference, more).unwrap();
            assert_eq!((&*found.repository, &*found.reference, &*found.target), (repository, expected, "sha256:chain"));
            assert_eq!((found.layers, found.table), (vec!["sha256:a".to_owned()], None));
        }
        let found = cri("h/a:1", &[(LAYERS[0], "sha256:a,sha256:b"), (TABLE, "sha256:t")]).unwrap();
        assert_eq!(found.layers, ["sha256:a", "sha256:b"]);
        assert_eq!(found.table.as_deref(), Some("sha256:t"));
        assert_eq!(cri("h/a:1", &[(LAYERS[0], "sha256:b")]).unwrap().layers, ["sha256:a"]);
        let stargz = labels(&[target, (REFERENCES[1], "h/a:1"), (DIGESTS[1], "sha256:a"), (LAYERS[1], "sha256:a")]);
        assert_eq!(Request::of(&stargz).unwrap().reference, "oci:h/a:1");
        for missing in [TARGET, REFERENCES[1], DIGESTS[1]] {
            let mut stargz = stargz.clone();
            stargz.remove(missing);
            assert_eq!(Request::of(&stargz), None, "{missing}");
        }
    }

    #[test]
    fn lists_match_registries_and_repositories_below_a_path() {
        let list = |entries: &[&str]| entries.iter().map(|entry| (*entry).to_owned()).collect::<Vec<_>>();
        for (entries, repository, expected) in [
            (&["*"][..], "h/a", true),
            (&[], "h/a", false),
            (&["h"], "h/a/b", true),
            (&["h/a"], "h/a", true),
            (&["h/a"], "h/a/b", true),
            (&["h/a"], "h/ab", false),
            (&["h"], "h:5000/a", false),
            (&["x", "h:5000"], "h:5000/a", true),
            (&[""], "h/a", false),
        ] {
            assert_eq!(includes(&list(entries), repository), expected, "{entries:?} {repository}");
        }
    }

    proptest! {
        #[test]
        fn every_reference_is_read_or_none(reference in "\\PC*", digest in "\\PC*") {
            let all = labels(&[(TARGET, "t"), (REFERENCES[0], &reference), (DIGESTS[0], &digest)]);
            if let Some(found) = Request::of(&all) {
                prop_assert!(found.reference.starts_with("oci:") && !found.layers.is_empty());
            }
        }
    }
}
