//! Authorities and certificates, made by OpenSSL.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A directory of certificates: `NAME.pem` with `NAME.key`.
pub struct Certificates(TempDir);

fn openssl(directory: &Path, line: &str) {
    let made = Command::new("openssl").args(line.split_whitespace()).current_dir(directory).output().unwrap();
    assert!(made.status.success(), "openssl {line}: {}", String::from_utf8_lossy(&made.stderr));
}

const KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";

impl Certificates {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("names"), "subjectAltName=DNS:localhost,IP:127.0.0.1\n").unwrap();
        Self(directory)
    }

    /// An authority.
    pub fn authority(&self, name: &str) -> &Self {
        openssl(self.0.path(), &format!("req -x509 {KEY} -keyout {name}.key -out {name}.pem -subj /CN={name} -days 3"));
        self
    }

    /// A certificate that an authority vouches for, valid for so many days from now on.
    pub fn signed(&self, name: &str, by: &str, days: i32) -> &Self {
        openssl(self.0.path(), &format!("req {KEY} -keyout {name}.key -out {name}.csr -subj /CN={name}"));
        let line = format!(
            "x509 -req -in {name}.csr -CA {by}.pem -CAkey {by}.key -CAcreateserial -days {days} -extfile names -out {name}.pem"
        );
        openssl(self.0.path(), &line);
        self
    }

    /// The same without extensions, as OpenSSL makes it unless it is told of some: X.509 version 1.
    #[allow(dead_code, reason = "each test file uses a part")]
    pub fn signed_as_version_1(&self, name: &str, by: &str) -> &Self {
        openssl(self.0.path(), &format!("req {KEY} -keyout {name}.key -out {name}.csr -subj /CN={name}"));
        let line = format!("x509 -req -in {name}.csr -CA {by}.pem -CAkey {by}.key -CAcreateserial -out {name}.pem");
        openssl(self.0.path(), &line);
        self
    }

    /// Where a file of it is.
    pub fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }
}
