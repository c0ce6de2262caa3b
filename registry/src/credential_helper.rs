//! Docker's credential helpers: programs that say the credentials for a server, and can get new ones each time.
//!
//! `docker-credential-NAME get` reads the server's name, and writes `{"Username": ..., "Secret": ...}`.

use std::io::{ErrorKind, Read, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;

/// How long a program may take: it may have to ask a server.
const HELPER_TIME: Duration = Duration::from_secs(30);
const TICK: Duration = Duration::from_millis(5);
/// The maximum length of what it writes.
const TEXT_BYTES_MAX: u64 = 64 << 10;
/// What it writes if it knows none.
const NOT_FOUND: &str = "credentials not found";
/// The user of a token that is not a password.
const TOKEN_USER: &str = "<token>";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct StoredCredentials {
    username: String,
    secret: String,
}

/// Asks a program for the user and the password for a server; `None`: it knows none.
///
/// # Errors
///
/// It cannot be started, fails, or takes too long. Nothing that it writes is shown, because it could be a secret.
pub(crate) fn ask(helper: &str, server: &str) -> Result<Option<(String, String)>, String> {
    if helper.is_empty() || !helper.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) {
        return Err("that is no name of a program".into());
    }
    let mut command = Command::new(format!("docker-credential-{helper}"));
    command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).env_remove("NOTIFY_SOCKET");
    let mut child = command.spawn().map_err(|error| match error.kind() {
        ErrorKind::NotFound => "there is no such program on the path".to_owned(),
        _ => format!("it cannot be started: {error}"),
    })?;
    if let Some(mut stdin) = child.stdin.take() {
        // It may know without.
        let _ = stdin.write_all(server.as_bytes());
    }
    let (sender, receiver) = channel();
    let stdout = child.stdout.take();
    // Not on this thread: a process that it has started may keep the pipe.
    let read = move || {
        let mut text = Vec::new();
        let _ = stdout.map(|stdout| stdout.take(TEXT_BYTES_MAX).read_to_end(&mut text));
        let _ = sender.send(text);
    };
    let reading = thread::Builder::new().name("credentials".into()).spawn(read);
    let end = Instant::now() + HELPER_TIME;
    let outcome = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Ok(status),
            Ok(None) if Instant::now() < end => thread::sleep(TICK),
            Ok(None) => break Err(format!("it did not end within {} s", HELPER_TIME.as_secs())),
            Err(error) => break Err(error.to_string()),
        }
    };
    if outcome.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let status = outcome?;
    reading.map_err(|error| format!("cannot start a thread: {error}"))?;
    let text = receiver.recv_timeout(end.saturating_duration_since(Instant::now()).max(TICK)).unwrap_or_default();
    if !status.success() {
        let is_unknown = String::from_utf8_lossy(&text).contains(NOT_FOUND);
        return if is_unknown { Ok(None) } else { Err(format!("it ended with {status}")) };
    }
    match serde_json::from_slice::<StoredCredentials>(&text) {
        Ok(StoredCredentials { username, .. }) if username == TOKEN_USER => {
            Err("it has an identity token, which is not used: it has to give a user and a password".into())
        }
        Ok(StoredCredentials { username, secret }) if !username.is_empty() && !username.contains(':') => {
            Ok(Some((username, secret)))
        }
        _ => Err("what it writes is no user and password in JSON".into()),
    }
}
