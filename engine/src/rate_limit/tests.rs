use proptest::prelude::*;

use super::*;

fn rates(requests: u64, bytes: u64, burst: Duration) -> Rates {
    Rates { requests: NonZeroU64::new(requests), bytes: NonZeroU64::new(bytes), burst }
}

fn bucket(rates: Rates) -> Arc<TokenBucket> {
    let bucket = TokenBucket::new(None);
    bucket.set_at(0, Some(rates));
    bucket
}

impl RateLimiter {
    fn wait_at(&self, now_ns: u64) -> Option<Duration> {
        if self.may_go_on() { None } else { self.refill(now_ns) }
    }
}

/// A client that always has the next request of this many bytes.
struct Client {
    limiter: Arc<RateLimiter>,
    request_bytes: u64,
    /// When it looks again.
    awake_ns: u64,
    requests: u64,
    bytes: u64,
}

impl Client {
    fn new(bucket: &Arc<TokenBucket>, request_bytes: u64) -> Self {
        Self { limiter: RateLimiter::new(bucket), request_bytes, awake_ns: 0, requests: 0, bytes: 0 }
    }

    /// Serves a request, or waits; `late_ns`: how long after the time it wakes up; `serve_ns`: how long a request takes.
    fn step(&mut self, late_ns: u64, serve_ns: u64) {
        match self.limiter.wait_at(self.awake_ns) {
            Some(wait) => self.awake_ns += nanoseconds(wait) + late_ns,
            None => {
                self.limiter.charge(self.request_bytes);
                self.requests += 1;
                self.bytes += self.request_bytes;
                self.awake_ns += serve_ns;
            }
        }
    }
}

/// Runs clients until `end_ns` of a simulated clock.
fn simulate(clients: &mut [Client], end_ns: u64, late_ns: u64, serve_ns: u64) {
    while let Some(client) = clients.iter_mut().min_by_key(|client| client.awake_ns) {
        if client.awake_ns >= end_ns {
            return;
        }
        client.step(late_ns, serve_ns);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever clients ask for, together they get the rate and no more, and each of them an equal share.
    #[test]
    fn the_rate_is_kept_and_shared_equally(
        requests in 20_u64..100_000,
        bytes in 100_000_u64..10_000_000_000,
        sizes in proptest::collection::vec(1_u64..1 << 17, 1..4),
        late_ns in 0_u64..1_000_000,
        serve_ns in 1_u64..2_000,
    ) {
        const END_NS: u64 = 4 * SECOND_NS;
        let all = bucket(rates(requests, bytes, BURST_MIN));
        let mut clients: Vec<Client> = sizes.iter().map(|size| Client::new(&all, *size)).collect();
        simulate(&mut clients, END_NS, late_ns, serve_ns);
        let (count, seconds) = (clients.len() as u64, END_NS as f64 / SECOND_NS as f64);
        let largest = sizes.iter().max().copied().unwrap_or(0);
        let served: u64 = clients.iter().map(|client| client.requests).sum();
        let moved: u64 = clients.iter().map(|client| client.bytes).sum();
        let longest = seconds + BURST_MIN.as_secs_f64();
        // A portion and one request of each client are in advance.
        let requests_max = requests as f64 * longest + (count * (portion(requests) + 1)) as f64;
        let bytes_max = bytes as f64 * longest + (count * (portion(bytes) + largest)) as f64;
        prop_assert!(served as f64 <= requests_max, "{served} requests of {requests_max}");
        prop_assert!(moved as f64 <= bytes_max, "{moved} bytes of {bytes_max}");
        if let [client] = &clients[..] {
            // One of the two rates, or the time that requests take, is what holds it up.
            let able = END_NS / serve_ns;
            let expected = (requests as f64 * seconds).min(bytes as f64 * seconds / client.request_bytes as f64);
            prop_assert!(served as f64 >= expected.min(able as f64) * 0.95 - 2.0, "{served} requests of {expected}");
        }
        if bytes / largest / count > requests {
            let (least, most) = (clients.iter().map(|client| client.requests).min(), clients.iter().map(|client| client.requests).max());
            let (least, most) = (least.unwrap_or(0) as f64, most.unwrap_or(0) as f64);
            // Besides an equal share, one may have been first with the burst.
            let first = requests as f64 * BURST_MIN.as_secs_f64() + 2.0 * portion(requests) as f64 + 2.0;
            prop_assert!(most <= least * 1.05 + first, "{least} to {most} requests");
        }
    }
}

#[test]
fn large_requests_get_no_more_bytes_than_small_ones() {
    let all = bucket(rates(0, 100 << 20, BURST_MIN));
    let mut clients = [Client::new(&all, 1 << 20), Client::new(&all, 4096)];
    simulate(&mut clients, 10 * SECOND_NS, 50_000, 1_000);
    let [large, small] = clients.map(|client| client.bytes as f64);
    assert!((0.95..1.05).contains(&(large / small)), "{large} and {small} bytes");
    let rate = (large + small) / 10.0;
    assert!((0.95..1.05).contains(&(rate / (100 << 20) as f64)), "{rate} bytes per second");
}

#[test]
fn unused_tokens_are_kept_up_to_the_burst() {
    let second = Duration::from_secs(1);
    for (idle_s, burst_s) in [(0, 1), (1, 1), (100, 1), (100, 5)] {
        let all = bucket(rates(1000, 0, second * burst_s));
        let limiter = RateLimiter::new(&all);
        let now_ns = idle_s * SECOND_NS;
        let mut at_once = 0;
        while limiter.wait_at(now_ns).is_none() {
            limiter.charge(0);
            at_once += 1;
        }
        assert_eq!(limiter.waits(), 1);
        let kept = 1000 * idle_s.min(burst_s.into());
        assert!((kept..=kept + 4).contains(&at_once), "{at_once} after {idle_s} s");
    }
}

#[test]
fn new_rates_replace_old_ones_and_their_debts() {
    let all = bucket(rates(1, 1, BURST_MIN));
    let limiter = RateLimiter::new(&all);
    assert_eq!(limiter.wait_at(0), None);
    limiter.charge(u64::MAX);
    assert_eq!(limiter.wait_at(0), Some(WAIT_MAX), "a change is noticed soon");
    all.set_at(0, Some(rates(1000, 0, BURST_MIN)));
    assert_eq!(limiter.wait_at(0), None, "the debt was of the old rate");
    (0..4).for_each(|_| limiter.charge(1 << 30));
    assert_eq!(limiter.wait_at(0), Some(Duration::from_millis(4)));
    all.set_at(0, None);
    assert_eq!((limiter.wait_at(0), limiter.is_on(), all.rates()), (None, false, None));
    limiter.charge(u64::MAX);
    all.set_at(0, Some(rates(1000, 0, BURST_MIN)));
    assert_eq!(limiter.wait_at(0), None, "what was served without a limit is free");
}

#[test]
fn the_greatest_rates_do_not_overflow() {
    let all = bucket(rates(REQUESTS_MAX, BYTES_MAX, BURST_MAX));
    let limiter = RateLimiter::new(&all);
    // Now, and after a hundred years.
    for now_ns in [0, 1, SECOND_NS, 100 * 366 * 86_400 * SECOND_NS] {
        assert_eq!(limiter.wait_at(now_ns), None);
        (0..1000).for_each(|_| limiter.charge(u64::MAX));
        assert!(limiter.wait_at(now_ns).is_some(), "a pebibyte is not free at {now_ns}");
        all.set_at(now_ns, Some(rates(REQUESTS_MAX, BYTES_MAX, BURST_MAX)));
    }
}

#[test]
fn workers_of_one_export_share_its_tokens() {
    const REQUESTS: u64 = 10_000;
    let all = TokenBucket::new(Some(rates(REQUESTS, 0, BURST_MIN)));
    let limiter = RateLimiter::new(&all);
    let begin = Instant::now();
    let end = Duration::from_millis(500);
    let served: u64 = std::thread::scope(|scope| {
        let work = || {
            let mut served = 0;
            while begin.elapsed() < end {
                match limiter.wait() {
                    Some(wait) => std::thread::sleep(wait),
                    None => {
                        limiter.charge(0);
                        served += 1;
                    }
                }
            }
            served
        };
        let workers: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    let most = REQUESTS as f64 * (begin.elapsed() + BURST_MIN + PORTION).as_secs_f64() + 4.0;
    assert!(served as f64 <= most, "{served} of {most} requests");
    assert!(served >= REQUESTS / 10, "{served} requests");
}
