// The playhead over a recording. Knows time, speed and rounds; knows no page.

// What is to be seen `millis` after the request began: the round, and whether it is decided.
// A round is on its way from the moment its tree was there until its commit came.
export function momentAt(rounds, millis) {
  const next = rounds.findIndex((round) => round.at_ms > millis);
  if (next < 0) return { number: rounds.length - 1, decided: true };
  const { timing_us: timing, at_ms: at, num_drafted: drafted } = rounds[next];
  const verifying = (timing.queue + timing.forward + timing.choice) / 1000;
  if (next === 0 || (drafted > 0 && millis >= at - verifying)) {
    return { number: next, decided: false };
  }
  return { number: next - 1, decided: true };
}

export class Player {
  // show(moment, millis) is called at every frame; ended() once at the end.
  constructor(show, ended) {
    this.show = show;
    this.ended = ended;
    this.speed = 0.2;
    this.frame = 0;
  }

  get playing() {
    return this.frame !== 0;
  }

  play(rounds, from = 0) {
    this.stop();
    let at = from;
    let last = performance.now();
    const tick = (now) => {
      at += (now - last) * this.speed;
      last = now;
      this.show(momentAt(rounds, at), at);
      if (at >= rounds.at(-1).at_ms) {
        this.frame = 0;
        this.ended();
        return;
      }
      this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
  }

  stop() {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = 0;
  }
}
