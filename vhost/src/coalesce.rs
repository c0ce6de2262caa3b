//! Interrupt coalescing: pauses between batches if the driver has many requests in flight and its notifications are
//! expensive.
//!
//! A fast worker completes requests one by one, so the guest takes an interrupt and sends a kick for each. In an emulated guest
//! that costs more than the request itself. So the worker measures now and then how many requests the driver has in flight: it
//! pauses, each time twice as long, until no more arrive. If they are many, it pauses after each batch until about half of them
//! have arrived: the driver always has the completions of the other half to process, and sends no kick.

use std::time::Duration;

/// The first rest of a look at how many requests come. Each of the next is twice as long.
const LOOK_FIRST: Duration = Duration::from_micros(32);

/// When nothing has come in so long a rest, the driver has something else to do.
const IDLE: Duration = Duration::from_micros(256);

/// The longest rest.
const REST_MAX: Duration = Duration::from_millis(1);

/// A driver that needs less for a request finds its signals cheap: one natively, or under KVM.
const GAP_MIN: Duration = Duration::from_micros(6);

/// So many rests in a row, each twice as long as the one before, that brought no more show all that is under way.
const STALE_MAX: u32 = 2;

/// With fewer requests under way, most of the driver's callers wait for an answer before they make the next.
const UNDER_WAY_MIN: u32 = 8;

/// More together are hardly cheaper.
const TOGETHER_MAX: u32 = 16;

/// Requests from one look to the next: at first, and at most where looks are in vain, ...
const LOOK_AFTER: u32 = 256;
const LOOK_AFTER_MAX: u32 = 16 * 1024;

/// ... where rests have paid until now: the driver has changed its ways, or gone on with another queue, ...
const LOOK_SOON: u32 = 64;

/// ... and where they pay: there may be more under way now, or fewer.
const LOOK_AGAIN: u32 = 4 * 1024;

/// So many rests in a row that brought less than half of what they should mean that the driver has changed its ways.
const POOR_MAX: u32 = 6;

/// Says how long to rest, and learns from what that brings.
#[derive(Debug)]
pub(crate) struct Coalescer {
    mode: Mode,
    /// Requests since the last look ended, how many are to be served before the next, and after that if it is in vain.
    served: u32,
    look_after: u32,
    look_after_next: u32,
}

#[derive(Clone, Copy, Debug)]
enum Mode {
    /// Takes each request as it comes.
    Prompt,
    /// The rest of this length, the most requests that came in one yet, in which, and how many brought no more since.
    Looking { rest: Duration, most: u32, most_in: Duration, stale: u32 },
    /// Rests for so long, in which this number should come; so many rests in a row brought far too few.
    Resting { rest: Duration, wanted: u32, poor: u32 },
}

impl Coalescer {
    pub(crate) fn new() -> Self {
        Self { mode: Mode::Prompt, served: 0, look_after: LOOK_AFTER, look_after_next: 2 * LOOK_AFTER }
    }

    /// How long to rest after a batch of `took` requests, all of which are answered.
    #[inline]
    pub(crate) fn delay_after(&mut self, took: usize) -> Option<Duration> {
        let took = u32::try_from(took).unwrap_or(u32::MAX);
        self.served = self.served.saturating_add(took);
        if matches!(self.mode, Mode::Prompt) && self.served < self.look_after {
            return None;
        }
        self.mode = self.next(took);
        match self.mode {
            Mode::Prompt => None,
            Mode::Looking { rest, .. } | Mode::Resting { rest, .. } => Some(rest),
        }
    }

    fn next(&mut self, took: u32) -> Mode {
        match self.mode {
            Mode::Prompt => next_probe(LOOK_FIRST),
            Mode::Looking { rest, most: 0, .. } if took == 0 && rest >= IDLE => self.give_up(),
            Mode::Looking { rest, most, most_in, stale } => {
                let (most, most_in, stale) = match took > most + most / 4 {
                    true => (took, rest, 0),
                    false => (most.max(took), most_in, stale + u32::from(most > 0)),
                };
                match stale == STALE_MAX || rest >= REST_MAX {
                    true => self.learn_depth(most, most_in),
                    false => Mode::Looking { rest: (2 * rest).min(REST_MAX), most, most_in, stale },
                }
            }
            Mode::Resting { rest, .. } if self.served >= LOOK_AGAIN => next_probe(rest),
            Mode::Resting { rest, wanted, poor } => {
                let poor = if took < wanted.div_ceil(2) { poor + 1 } else { 0 };
                let rest = match took.cmp(&wanted) {
                    std::cmp::Ordering::Less => (rest + rest / 8).min(REST_MAX),
                    std::cmp::Ordering::Equal => rest,
                    std::cmp::Ordering::Greater => rest - rest / 8,
                };
                match poor == POOR_MAX {
                    true => self.stop_coalescing(LOOK_SOON),
                    false if rest < GAP_MIN * wanted => self.give_up(),
                    false => Mode::Resting { rest, wanted, poor },
                }
            }
        }
    }

    /// So many are under way, which came in a rest of this length.
    fn learn_depth(&mut self, under_way: u32, came_in: Duration) -> Mode {
        let wanted = (under_way / 2).min(TOGETHER_MAX);
        let rest = came_in * wanted / under_way.max(1);
        if under_way < UNDER_WAY_MIN || rest < GAP_MIN * wanted {
            return self.give_up();
        }
        self.served = 0;
        Mode::Resting { rest, wanted, poor: 0 }
    }

    /// Rests were in vain: the next look is later.
    fn give_up(&mut self) -> Mode {
        let next = self.look_after_next;
        let mode = self.stop_coalescing(next);
        self.look_after_next = (2 * next).min(LOOK_AFTER_MAX);
        mode
    }

    fn stop_coalescing(&mut self, look_after: u32) -> Mode {
        (self.served, self.look_after, self.look_after_next) = (0, look_after, LOOK_AFTER);
        Mode::Prompt
    }
}

fn next_probe(rest: Duration) -> Mode {
    Mode::Looking { rest, most: 0, most_in: rest, stale: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A driver that makes a request each `gap` for as long as fewer than `depth` are under way, and `together` at once.
    struct Driver {
        depth: u32,
        gap: Duration,
    }

    impl Driver {
        /// How many wait after so long.
        fn makes_in(&self, time: Duration) -> u32 {
            u32::try_from(time.as_nanos() / self.gap.as_nanos()).unwrap_or(u32::MAX).min(self.depth)
        }
    }

    /// Serves so many requests of a driver. Returns how many batches that took, and the rests.
    fn serve(pace: &mut Coalescer, driver: &Driver, requests: u32) -> (u32, Vec<Duration>) {
        let (mut left, mut batches, mut rests, mut waiting) = (requests, 0, Vec::new(), 1);
        while left > 0 {
            left = left.saturating_sub(waiting);
            batches += 1;
            // Without a rest, the worker sleeps until a request comes.
            waiting = match pace.delay_after(usize::try_from(waiting).expect("few")) {
                Some(rest) => {
                    rests.push(rest);
                    driver.makes_in(rest)
                }
                None => 1,
            };
        }
        (batches, rests)
    }

    fn is_resting(pace: &Coalescer) -> Option<(Duration, u32)> {
        if let Mode::Resting { rest, wanted, .. } = pace.mode { Some((rest, wanted)) } else { None }
    }

    const EMULATED: Duration = Duration::from_micros(40);

    #[test]
    fn half_of_what_is_under_way_is_taken_together() {
        for (depth, wanted) in [(8, 4), (16, 8), (64, 12)] {
            let mut pace = Coalescer::new();
            let (batches, _) = serve(&mut pace, &Driver { depth, gap: EMULATED }, 20_000);
            let (rest, found) = is_resting(&pace).expect("it pays");
            assert_eq!(found, wanted, "{depth}: 25 come in the longest rest");
            let come = rest.div_duration_f64(EMULATED);
            assert!((come - f64::from(wanted)).abs() <= 1.0, "{depth}: {come} come in {rest:?}");
            assert!(batches < 20_000 / wanted + 1000, "{depth}: {batches} batches");
        }
    }

    #[test]
    fn callers_who_wait_are_answered_at_once_but_for_a_look_now_and_then() {
        for depth in 1..UNDER_WAY_MIN {
            for gap in [1, 20, 40, 150].map(Duration::from_micros) {
                let mut pace = Coalescer::new();
                let (_, rests) = serve(&mut pace, &Driver { depth, gap }, 1_000_000);
                assert!(is_resting(&pace).is_none());
                // 256, 768, 1792 ... 16128, and one after each further 16384.
                assert!(rests.len() < 70 * 8, "{depth} {gap:?}: {} rests", rests.len());
                assert!(rests.iter().all(|rest| *rest <= REST_MAX));
            }
        }
    }

    #[test]
    fn fast_drivers_are_never_rested_for() {
        let mut pace = Coalescer::new();
        let (_, rests) = serve(&mut pace, &Driver { depth: 16, gap: Duration::from_micros(2) }, 1_000_000);
        assert!(is_resting(&pace).is_none());
        assert!(rests.len() < 70 * 4, "{} rests", rests.len());
        assert!(rests.iter().all(|rest| *rest <= 4 * LOOK_FIRST), "{rests:?}");
    }

    #[test]
    fn fast_drivers_are_not_rested_for_however_much_they_have_under_way() {
        let mut pace = Coalescer::new();
        let (_, rests) = serve(&mut pace, &Driver { depth: 64, gap: Duration::from_micros(4) }, 1_000_000);
        assert!(is_resting(&pace).is_none());
        // A look finds a rest of twice the length at most, which soon follows what it brings.
        assert!(rests.len() < 70 * 16, "{} rests", rests.len());
    }

    #[test]
    fn a_driver_that_has_stopped_is_given_up_soon() {
        let mut pace = Coalescer::new();
        assert_eq!(pace.delay_after(LOOK_AFTER as usize - 1), None);
        let mut rests: Vec<Duration> = [pace.delay_after(1)].into_iter().flatten().collect();
        while let Some(rest) = pace.delay_after(0) {
            rests.push(rest);
        }
        assert_eq!(rests, [32, 64, 128, 256].map(Duration::from_micros));
        assert_eq!(pace.look_after, 2 * LOOK_AFTER);
    }

    #[test]
    fn ways_that_change_are_noticed() {
        let mut pace = Coalescer::new();
        serve(&mut pace, &Driver { depth: 16, gap: EMULATED }, 5000);
        assert!(is_resting(&pace).is_some());
        let one = Driver { depth: 1, gap: EMULATED };
        let (batches, rests) = serve(&mut pace, &one, 63);
        assert_eq!((batches, rests.len()), (63, POOR_MAX as usize - 1), "the first takes what was there");
        assert!(is_resting(&pace).is_none());
        // And once more the other way, soon.
        serve(&mut pace, &Driver { depth: 16, gap: EMULATED }, LOOK_SOON + 100);
        assert_eq!(is_resting(&pace).map(|(_, wanted)| wanted), Some(8));
        // More under way, which the next look shows.
        serve(&mut pace, &Driver { depth: 24, gap: EMULATED }, 2 * LOOK_AGAIN);
        assert_eq!(is_resting(&pace).map(|(_, wanted)| wanted), Some(12));
        // A driver that has become fast.
        serve(&mut pace, &Driver { depth: 24, gap: Duration::from_micros(1) }, 2000);
        assert!(is_resting(&pace).is_none());
    }
}
