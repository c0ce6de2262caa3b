//! Interrupt coalescing: pauses between batches if the driver has many requests in flight and its notifications are
//! expensive.
//!
//! A fast worker completes requests one by one, so the guest takes an interrupt and sends a kick for each. In an
//! emulated guest that costs more than the request itself. So the worker sometimes probes how many requests the
//! driver has in flight: it pauses, each time twice as long, until no more arrive. If they are many, it pauses after
//! each batch until about half of them have arrived: the driver always has the completions of the other half to
//! process, and sends no kick.

use std::time::Duration;

/// The first pause of a probe. Each further pause is twice as long.
const PROBE_FIRST: Duration = Duration::from_micros(32);

/// If no request arrives in a pause of this length, the driver is idle.
const IDLE: Duration = Duration::from_micros(256);

/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// A driver that takes less than this per request has cheap signals: it runs natively or under KVM.
const GAP_MIN: Duration = Duration::from_micros(6);

/// Pauses in a row without more requests after which a probe ends.
const STALE_MAX: u32 = 2;

/// With fewer requests in flight, most of the driver's callers wait for a reply before they send the next request.
const IN_FLIGHT_MIN: u32 = 8;

/// Larger batches are hardly cheaper.
const BATCH_MAX: u32 = 16;

/// Requests before the first probe, and the most between probes that fail.
const PROBE_AFTER: u32 = 256;
const PROBE_AFTER_MAX: u32 = 16 * 1024;

/// Requests before the next probe after pauses have stopped paying: the driver has changed, or uses another queue.
const PROBE_SOON: u32 = 64;

/// Requests before the next probe while pauses pay: the number in flight may have changed.
const PROBE_AGAIN: u32 = 4 * 1024;

/// Pauses in a row with less than half of the expected requests after which the driver is assumed to have changed.
const POOR_MAX: u32 = 6;

/// Decides how long to pause after each batch, by the requests that earlier pauses brought.
#[derive(Debug)]
pub(crate) struct Coalescer {
    mode: Mode,
    /// Requests since the last probe, the number before the next one, and the number after that if it fails.
    served: u32,
    probe_after: u32,
    probe_after_next: u32,
}

#[derive(Clone, Copy, Debug)]
enum Mode {
    /// Takes each request as it arrives.
    Prompt,
    /// Probes: the length of this pause, the most requests in one pause, the length of that one, and pauses since
    /// without more.
    Probing { pause: Duration, most: u32, most_in: Duration, stale: u32 },
    /// Pauses: the length, the expected number of requests, and pauses in a row with far too few.
    Pausing { pause: Duration, wanted: u32, poor: u32 },
}

impl Coalescer {
    pub(crate) fn new() -> Self {
        Self { mode: Mode::Prompt, served: 0, probe_after: PROBE_AFTER, probe_after_next: 2 * PROBE_AFTER }
    }

    /// Returns how long to pause after a batch of `took` requests, which are all completed.
    #[inline]
    pub(crate) fn delay_after(&mut self, took: usize) -> Option<Duration> {
        let took = u32::try_from(took).unwrap_or(u32::MAX);
        self.served = self.served.saturating_add(took);
        if matches!(self.mode, Mode::Prompt) && self.served < self.probe_after {
            return None;
        }
        self.mode = self.next(took);
        match self.mode {
            Mode::Prompt => None,
            Mode::Probing { pause, .. } | Mode::Pausing { pause, .. } => Some(pause),
        }
    }

    fn next(&mut self, took: u32) -> Mode {
        match self.mode {
            Mode::Prompt => next_probe(PROBE_FIRST),
            Mode::Probing { pause, most: 0, .. } if took == 0 && pause >= IDLE => self.fail_probe(),
            Mode::Probing { pause, most, most_in, stale } => {
                let (most, most_in, stale) = match took > most + most / 4 {
                    true => (took, pause, 0),
                    false => (most.max(took), most_in, stale + u32::from(most > 0)),
                };
                match stale == STALE_MAX || pause >= PAUSE_MAX {
                    true => self.learn_depth(most, most_in),
                    false => Mode::Probing { pause: (2 * pause).min(PAUSE_MAX), most, most_in, stale },
                }
            }
            Mode::Pausing { pause, .. } if self.served >= PROBE_AGAIN => next_probe(pause),
            Mode::Pausing { pause, wanted, poor } => {
                let poor = if took < wanted.div_ceil(2) { poor + 1 } else { 0 };
                let pause = match took.cmp(&wanted) {
                    std::cmp::Ordering::Less => (pause + pause / 8).min(PAUSE_MAX),
                    std::cmp::Ordering::Equal => pause,
                    std::cmp::Ordering::Greater => pause - pause / 8,
                };
                match poor == POOR_MAX {
                    true => self.stop_coalescing(PROBE_SOON),
                    false if pause < GAP_MIN * wanted => self.fail_probe(),
                    false => Mode::Pausing { pause, wanted, poor },
                }
            }
        }
    }

    /// Ends a probe that found `in_flight` requests in a pause of length `came_in`.
    fn learn_depth(&mut self, in_flight: u32, came_in: Duration) -> Mode {
        let wanted = (in_flight / 2).min(BATCH_MAX);
        let pause = came_in * wanted / in_flight.max(1);
        if in_flight < IN_FLIGHT_MIN || pause < GAP_MIN * wanted {
            return self.fail_probe();
        }
        self.served = 0;
        Mode::Pausing { pause, wanted, poor: 0 }
    }

    /// Stops coalescing after a failed probe; the next one is later.
    fn fail_probe(&mut self) -> Mode {
        let next = self.probe_after_next;
        let mode = self.stop_coalescing(next);
        self.probe_after_next = (2 * next).min(PROBE_AFTER_MAX);
        mode
    }

    fn stop_coalescing(&mut self, probe_after: u32) -> Mode {
        (self.served, self.probe_after, self.probe_after_next) = (0, probe_after, PROBE_AFTER);
        Mode::Prompt
    }
}

fn next_probe(pause: Duration) -> Mode {
    Mode::Probing { pause, most: 0, most_in: pause, stale: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver that sends a request each `gap` while fewer than `depth` are in flight.
    struct Driver {
        depth: u32,
        gap: Duration,
    }

    impl Driver {
        /// Returns how many requests arrive in this time.
        fn makes_in(&self, time: Duration) -> u32 {
            u32::try_from(time.as_nanos() / self.gap.as_nanos()).unwrap_or(u32::MAX).min(self.depth)
        }
    }

    /// Serves requests of a driver; returns the number of batches, and the pauses.
    fn serve(coalescer: &mut Coalescer, driver: &Driver, requests: u32) -> (u32, Vec<Duration>) {
        let (mut left, mut batches, mut pauses, mut waiting) = (requests, 0, Vec::new(), 1);
        while left > 0 {
            left = left.saturating_sub(waiting);
            batches += 1;
            // Without a pause, the worker sleeps until a request arrives.
            waiting = match coalescer.delay_after(usize::try_from(waiting).expect("few")) {
                Some(pause) => {
                    pauses.push(pause);
                    driver.makes_in(pause)
                }
                None => 1,
            };
        }
        (batches, pauses)
    }

    fn is_pausing(coalescer: &Coalescer) -> Option<(Duration, u32)> {
        if let Mode::Pausing { pause, wanted, .. } = coalescer.mode { Some((pause, wanted)) } else { None }
    }

    const EMULATED: Duration = Duration::from_micros(40);

    #[test]
    fn batches_are_half_of_the_requests_in_flight() {
        for (depth, wanted) in [(8, 4), (16, 8), (64, 12)] {
            let mut coalescer = Coalescer::new();
            let (batches, _) = serve(&mut coalescer, &Driver { depth, gap: EMULATED }, 20_000);
            let (pause, found) = is_pausing(&coalescer).expect("it pays");
            assert_eq!(found, wanted, "{depth}: 25 come in the longest pause");
            let come = pause.div_duration_f64(EMULATED);
            assert!((come - f64::from(wanted)).abs() <= 1.0, "{depth}: {come} come in {pause:?}");
            assert!(batches < 20_000 / wanted + 1000, "{depth}: {batches} batches");
        }
    }

    #[test]
    fn waiting_callers_are_not_delayed_except_by_probes() {
        for depth in 1..IN_FLIGHT_MIN {
            for gap in [1, 20, 40, 150].map(Duration::from_micros) {
                let mut coalescer = Coalescer::new();
                let (_, pauses) = serve(&mut coalescer, &Driver { depth, gap }, 1_000_000);
                assert!(is_pausing(&coalescer).is_none());
                // 256, 768, 1792 ... 16128, and one after each further 16384.
                assert!(pauses.len() < 70 * 8, "{depth} {gap:?}: {} pauses", pauses.len());
                assert!(pauses.iter().all(|pause| *pause <= PAUSE_MAX));
            }
        }
    }

    #[test]
    fn there_are_no_pauses_for_fast_drivers() {
        let mut coalescer = Coalescer::new();
        let (_, pauses) = serve(&mut coalescer, &Driver { depth: 16, gap: Duration::from_micros(2) }, 1_000_000);
        assert!(is_pausing(&coalescer).is_none());
        assert!(pauses.len() < 70 * 4, "{} pauses", pauses.len());
        assert!(pauses.iter().all(|pause| *pause <= 4 * PROBE_FIRST), "{pauses:?}");
    }

    #[test]
    fn there_are_no_pauses_for_fast_drivers_with_deep_queues() {
        let mut coalescer = Coalescer::new();
        let (_, pauses) = serve(&mut coalescer, &Driver { depth: 64, gap: Duration::from_micros(4) }, 1_000_000);
        assert!(is_pausing(&coalescer).is_none());
        // A probe finds at most twice the length, which is then adapted.
        assert!(pauses.len() < 70 * 16, "{} pauses", pauses.len());
    }

    #[test]
    fn a_probe_of_a_stopped_driver_ends_soon() {
        let mut coalescer = Coalescer::new();
        assert_eq!(coalescer.delay_after(PROBE_AFTER as usize - 1), None);
        let mut pauses: Vec<Duration> = [coalescer.delay_after(1)].into_iter().flatten().collect();
        while let Some(pause) = coalescer.delay_after(0) {
            pauses.push(pause);
        }
        assert_eq!(pauses, [32, 64, 128, 256].map(Duration::from_micros));
        assert_eq!(coalescer.probe_after, 2 * PROBE_AFTER);
    }

    #[test]
    fn a_changed_driver_is_detected() {
        let mut coalescer = Coalescer::new();
        serve(&mut coalescer, &Driver { depth: 16, gap: EMULATED }, 5000);
        assert!(is_pausing(&coalescer).is_some());
        let one = Driver { depth: 1, gap: EMULATED };
        let (batches, pauses) = serve(&mut coalescer, &one, 63);
        assert_eq!((batches, pauses.len()), (63, POOR_MAX as usize - 1), "the first takes the waiting requests");
        assert!(is_pausing(&coalescer).is_none());
        // And back again, soon.
        serve(&mut coalescer, &Driver { depth: 16, gap: EMULATED }, PROBE_SOON + 100);
        assert_eq!(is_pausing(&coalescer).map(|(_, wanted)| wanted), Some(8));
        // More in flight, which the next probe finds.
        serve(&mut coalescer, &Driver { depth: 24, gap: EMULATED }, 2 * PROBE_AGAIN);
        assert_eq!(is_pausing(&coalescer).map(|(_, wanted)| wanted), Some(12));
        // A driver that has become fast.
        serve(&mut coalescer, &Driver { depth: 24, gap: Duration::from_micros(1) }, 2000);
        assert!(is_pausing(&coalescer).is_none());
    }
}
