//! Registries with a password, which changes while containers run.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use crate::fake::Reply;
use crate::lazy_place::{LARGE, Place, is_right, layers, noise, until};
use crate::server::{Mounted, can_mount};
use crate::toc_layers::FORMATS;

fn auth(password: &str) -> String {
    STANDARD.encode(format!("me:{password}"))
}

/// Writes a secret as Kubernetes mounts it: a link through a link that is replaced.
fn write_secret(directory: &Path, address: &str, password: &str) {
    let version = directory.join(format!("..{password}"));
    fs::create_dir_all(&version).unwrap();
    let secret = json!({"auths": {address: {"username": "me", "password": password, "auth": auth(password)}}});
    fs::write(version.join(".dockerconfigjson"), secret.to_string()).unwrap();
    symlink(version.file_name().unwrap(), directory.join("..new")).unwrap();
    fs::rename(directory.join("..new"), directory.join("..data")).unwrap();
    // Only the first time.
    let _ = symlink("..data/.dockerconfigjson", directory.join(".dockerconfigjson"));
}

/// containerd/stargz-snapshotter issues 1989, 2211: containers failed after a restart, because the credentials of their pulls were gone;
/// awslabs/soci-snapshotter issue 1148: those that had become too old were used on.
#[test]
fn a_secret_that_changes_is_used_by_the_processes_that_run() {
    if !can_mount() {
        return;
    }
    for format in FORMATS {
        let mut place = Place::configured(layers(format), 0, "credentials = \"secrets\"\n");
        let (secrets, address) = (place.server.directory.path().join("secrets"), place.fake.address.to_string());
        let password = Arc::new(Mutex::new("one".to_owned()));
        let expected = Arc::clone(&password);
        place.fake.fault(move |request, reply| {
            let wanted = format!("Basic {}", auth(&expected.lock().unwrap()));
            match request.headers.get("authorization") {
                Some(found) if *found == wanted => reply,
                _ => Reply::of(401, "").with("www-authenticate", "Basic realm=\"x\""),
            }
        });
        let mut client = place.server.client();
        // Without a secret, and with a wrong one, layers are unpacked.
        fs::create_dir(&secrets).unwrap();
        for secret in [None, Some("wrong")] {
            secret.inspect(|secret| write_secret(&secrets, &address, secret));
            place.prepare(&mut client, 0, "", place.labels(0)).unwrap_err();
            client.list(&[]).unwrap().iter().for_each(|info| client.remove(&info.name).unwrap());
            // It is remembered for some time that the image does not start lazily.
            place.server.stop();
            client = place.server.start_again();
        }
        write_secret(&secrets, &address, "one");
        place.pull(&mut client);
        let mounted = Mounted::of(&client.prepare("container", &place.top()).unwrap());
        let read = |name: &str| fs::read(mounted.path().join(name));
        assert_eq!(read("small").unwrap(), noise(1, 20_000));
        let process = place.process();
        // The registry knows another one, and then the secret has it.
        *password.lock().unwrap() = "two".into();
        assert_eq!(read("above").unwrap_err().raw_os_error(), Some(libc::EIO), "{format:?}");
        write_secret(&secrets, &address, "two");
        until("the file", || read("above").is_ok_and(|bytes| bytes == noise(5, 20_000)));
        // Both change before anything is read, which has no visible effect.
        *password.lock().unwrap() = "three".into();
        write_secret(&secrets, &address, "three");
        assert!(read("large").unwrap() == noise(4, LARGE), "{format:?}");
        assert_eq!(place.process(), process, "the same");
        is_right(mounted.path());
    }
}
