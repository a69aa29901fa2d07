from support.faulty_jobs import check_same_run

STEPS = ("--steps", "60", "--eval-every", "5000", "--checkpoint-every", "3600")


def test_smoke(jobs, undisturbed):
    job = jobs(*STEPS, size=3)
    job.until(lambda: job.last() > 3, 70)
    print(
        job.workers(),
        job.step_s(),
        job.entered(0.1),
        job.longest_s(0),
        job.saved(),
        job.worlds(),
        job.lives(),
    )
    job.finish()
    check_same_run(job, undisturbed(*STEPS))
