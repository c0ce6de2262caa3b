//! Registries over HTTPS: trusted certificates, and errors for others.
#![cfg(feature = "registry")]
use crate::certificates;
use crate::common;

use std::process::Command;

use certificates::Certificates;
use common::images::{Place, text};
use common::servers::registry_by_tls;
use common::{refused, run};

#[test]
fn registries_are_believed_by_their_certificates() {
    let made = Certificates::new();
    made.authority("ours").authority("others").signed("server", "ours", 3).signed("late", "ours", -1);
    let place = Place::new();
    place.build();
    let Some(server) = registry_by_tls(&place.at("server"), "127.0.0.1", &made.path("server.pem")) else { return };
    let go = |command: &str, host: &str, authority: &str| -> Command {
        let mut line = place.command(command, "store");
        line.env("SSL_CERT_FILE", made.path(authority))
            .env_remove("SSL_CERT_DIR")
            .env("FERRY_LOG", "info,ferry_registry=debug");
        let reference = format!("oci:https://{host}:{}/os/base:12", server.address.port());
        match command {
            "push" => line.arg(place.at("image")).arg(reference),
            _ => line.arg(reference).arg("-o").arg(place.at("copy")),
        };
        line
    };
    text(&mut go("push", "127.0.0.1", "ours.pem"));
    text(&mut go("pull", "localhost", "ours.pem"));
    assert_eq!(std::fs::read(place.at("copy")).unwrap(), std::fs::read(place.at("image")).unwrap());

    // An untrusted certificate is reported once, without retries.
    let said = refused(1, &mut go("pull", "127.0.0.1", "others.pem"));
    assert!(said.contains("UnknownIssuer") && said.contains("set SSL_CERT_FILE to a PEM file"), "{said}");
    let output = run(&mut go("push", "127.0.0.1", "others.pem"));
    assert!(!output.status.success() && output.stdout.is_empty());

    // A certificate of the past, and one for another name.
    for (certificate, address, expected) in
        [("late", "127.0.0.1", "xpired"), ("server", "127.0.0.2", "not valid for name")]
    {
        let server = registry_by_tls(&place.at("other"), address, &made.path(&format!("{certificate}.pem"))).unwrap();
        let mut line = place.command("pull", "store");
        line.env("SSL_CERT_FILE", made.path("ours.pem")).arg(format!("oci:https://{}/os/base:12", server.address));
        let said = refused(1, line.arg("-o").arg(place.at("none")));
        assert!(said.contains(expected) && !place.at("none").exists(), "{expected}: {said}");
    }
}
