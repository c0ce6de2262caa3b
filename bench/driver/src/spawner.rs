//! Restarts a server that ends with its client, as virtiofsd does.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a new server may take until it listens.
const START_TIMEOUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

/// Keeps a server running that ends with its client.
pub struct Spawner {
    stop: Arc<AtomicBool>,
    child: Arc<Mutex<Option<Child>>>,
    /// How often the server was started.
    starts: Arc<AtomicU32>,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Spawner {
    /// Starts the server, now and whenever it has ended.
    pub fn start(command: &str, socket: &Path) -> Self {
        let (stop, child) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let starts = Arc::new(AtomicU32::new(0));
        let thread = {
            let (stop, child, starts) = (stop.clone(), child.clone(), starts.clone());
            let (command, socket) = (command.to_owned(), socket.to_owned());
            std::thread::spawn(move || keep_running(&stop, &child, &starts, &command, &socket))
        };
        let spawner = Self { stop, child, starts, socket: socket.to_owned(), thread: Some(thread) };
        while spawner.starts.load(Ordering::SeqCst) == 0
            && spawner.thread.as_ref().is_some_and(|thread| !thread.is_finished())
        {
            std::thread::sleep(PAUSE);
        }
        spawner
    }
}

impl Spawner {
    /// Ends the server, which may hang, and waits until a new one listens.
    pub fn restart(&self) {
        let before = self.starts.load(Ordering::SeqCst);
        self.kill();
        let end = Instant::now() + START_TIMEOUT;
        while (self.starts.load(Ordering::SeqCst) == before || !self.socket.exists()) && Instant::now() < end {
            std::thread::sleep(PAUSE);
        }
    }

    fn kill(&self) {
        if let Some(child) = self.child.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            let _ = child.kill();
        }
    }
}

fn keep_running(stop: &AtomicBool, child: &Mutex<Option<Child>>, starts: &AtomicU32, command: &str, socket: &Path) {
    while !stop.load(Ordering::SeqCst) {
        // A socket that is left over would be connected to in vain.
        let _ = std::fs::remove_file(socket);
        let exec = format!("exec {command}");
        let started = Command::new("sh").args(["-c", &exec]).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        match started {
            Ok(started) => *child.lock().unwrap_or_else(PoisonError::into_inner) = Some(started),
            Err(error) => return eprintln!("ferry-driver: cannot start {command}: {error}"),
        }
        starts.fetch_add(1, Ordering::SeqCst);
        loop {
            let mut child = child.lock().unwrap_or_else(PoisonError::into_inner);
            if child.as_mut().is_none_or(|child| !matches!(child.try_wait(), Ok(None))) {
                break;
            }
            drop(child);
            std::thread::sleep(PAUSE);
        }
    }
}

impl Drop for Spawner {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.kill();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
